"""A thread beside training: it tells other ranks what this one does, and ends the run when nobody gets on.

The main thread only notes where it is. What other ranks do, the thread reads where they met; a rank that holds Python's
lock cannot run it, and is ended by a timer of the interpreter, which needs no lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nxtrain.backends.base import Backend
from nxtrain.distributed.first_failure import within
from nxtrain.distributed.heartbeats import PATIENCE_S, Beat
from nxtrain.distributed.link import Link
from nxtrain.distributed.lost_peers import loss
from nxtrain.errors import HangError, StoppedBySignal
from nxtrain.io.transfer_progress import arrived
from nxtrain.process import stacks
from nxtrain.process.background import Aside
from nxtrain.process.signals import Signals
from nxtrain.process.stacks import say
from nxtrain.train.health.recompiles import WARM_UP
from nxtrain.train.supervision.coordinated_stop import Stop
from nxtrain.train.supervision.hang_diagnosis import agree, point, waits
from nxtrain.train.supervision.received import Received
from nxtrain.train.supervision.stragglers import Stragglers

TICK_S = 0.25
"""Between looks at this rank."""

SLOWEST_BEAT_S, FASTEST_BEAT_S, BEATS = 10.0, 0.5, 180
"""Between looks at the others: so often within the limit, so that thousands of ranks do not trouble the store."""

COMPILE_PATIENCE = 4.0
"""Times the limit for the start and for work that may still compile, on devices that compile whole steps."""

FILES_S = 5.0
"""For what is written when a run hangs, which a disk may be the cause of."""

RESTORE = "restore"
"""The section in which bytes that come, to whichever rank, are as good as steps: a slow store is no hang."""

TIMED = {"data", "training"}
"""What all ranks of a stage do alike in each step, so that it can be compared."""


class Watchdog:
    """Watches this rank, and with the others' watchdogs the run; as a context.

    Args:
        backend: This rank's device, open.
        hang_timeout_s: Seconds without progress after which the run counts as hung.
        logs: Folder for stacks.
        signals: What this process was asked for.

    Attributes:
        gate: Before each step.
        on_hang: Is called with the verdict before the process ends.
        on_stop: Is called with the reason once the run is to stop.
        on_tick: Is called all the time, if there is one.
    """

    def __init__(self, backend: Backend, hang_timeout_s: float, logs: Path, signals: Signals) -> None:
        self.on_hang: Callable[[str], None] = lambda verdict: None
        self.on_stop: Callable[[str], None] = lambda why: None
        self.on_tick: Callable[[], None] | None = None
        self._backend, self._limit_s, self._logs, self._signals = backend, hang_timeout_s, logs, signals
        self._link = Link(backend.board())
        self._stop = Stop(backend.rank, backend.world, signals, self._link, self._tell_stop)
        self.gate = self._stop.gate
        self._ticking = Aside("nxtrain-tick")
        self._words: Callable[[int], str] = "rank {}".format
        self._compiles = backend.compiler is None
        self._stragglers: Stragglers | None = None
        self._times: Counter[str] = Counter()
        self._spent: dict[str, float] = {}
        self._at = (0, "start", time.monotonic(), 0.0)
        self._received = Received(arrived)
        self._limited = not backend.extracts  # whose whole run is one compilation
        self._late = self._hanging = False
        self._ended = threading.Event()
        self._next_beat = 0.0
        self._failures: set[str] = set()
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="nxtrain-watchdog", daemon=True)
        stacks.answer_requests()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop, whatever comes of it."""
        return bool(self._signals.asked)

    @property
    def stopped_by(self) -> str:
        """Which signal, at which rank; empty: none."""
        return self._stop.why

    def enter(self, step: int, section: str) -> None:
        """Note what the main thread does now; costs two looks at clocks."""
        now, waited = time.monotonic(), self._backend.waited_s()
        _, before, since, waited_before = self._at
        if before in TIMED:
            spent = now - since - (waited - waited_before)
            self._spent = {**self._spent, before: self._spent.get(before, 0.0) + spent}
        if section not in TIMED or self._times[section] <= WARM_UP:
            self._times[section] += 1
        self._at = (step, section, now, waited)

    def lay_out(self, words: Callable[[int], str], stages: Sequence[int]) -> None:
        """Learn how ranks are named, and which work alike.

        Args:
            words: Names a rank.
            stages: Pipeline stage of each.
        """
        self._words = words
        if self._backend.rank == 0:
            self._stragglers = Stragglers(stages)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, StoppedBySignal):
            self._close()
        elif isinstance(error, Exception):
            self._yield_to(error)
        else:
            self._end()

    def _yield_to(self, error: Exception) -> None:
        """Leave the end of the run to the main thread, unless it is a hang, of which the watchdogs tell more.

        Args:
            error: What ended the run here. If it is a hang, this does not return where ranks share a store.
        """
        board = self._link.board
        if board is not None and self._thread.is_alive():
            hangs = isinstance(loss(error), HangError)
            try:
                hangs = hangs or board.hang_declared()
            except RuntimeError:
                hangs = False
            if hangs or self._hanging:
                self._late = True
                self._signals.news.set()
                self._thread.join(20)
        self._end()

    def _close(self) -> None:
        """End, after a run that ended well; the other ranks need not wait for this one."""
        self._end()
        if (board := self._link.board) is not None:
            try:
                board.answer(Beat(self._at[0], "end", 0.0, waits=True))
                self._stop.leave(board)
            except RuntimeError:  # the store went with its rank
                return

    def _end(self) -> None:
        self._ended.set()
        self._signals.news.set()
        self._thread.join(3 * PATIENCE_S)  # unless the screen keeps it waiting, or the store more than once
        stacks.dismiss()

    def _run(self) -> None:
        duties = (
            self._put_off_end,
            self._look_at_agent,
            self._tick,
            self._look_at_myself,
            self._look_at_stop,
            self._look_at_others,
        )
        try:
            while not self._ended.is_set():
                for duty in duties:
                    self._try(duty)
                self._signals.news.wait(self._pause())
                self._signals.news.clear()
        finally:
            stacks.dismiss()  # nobody would put the end off any more

    def _try(self, duty: Callable[[], None]) -> None:
        """Do a part of the watch; what it fails of, such as a thread that cannot be started, keeps it from no other."""
        try:
            duty()
        except Exception as error:
            if self._hanging:
                say(f"error: rank {self._backend.rank}: the run hangs; the watch fails too: {error}")
                os._exit(HangError.exit_code)
            told = f"{type(error).__name__}: {error}"
            if told not in self._failures:
                self._failures.add(told)
                say(f"warning: rank {self._backend.rank}: a part of its watch failed, and is tried again: {told}")

    def _put_off_end(self) -> None:
        if self._limited:
            stacks.end_in(self._limit() + 2.0)  # a rank that holds Python's lock, after the others have named it

    def _look_at_agent(self) -> None:
        if self._agent is not None and os.getppid() != self._agent:
            say(f"error: rank {self._backend.rank}: the agent that started it is gone, and it ends too")
            os._exit(1)

    def _tick(self) -> None:
        if self.on_tick is not None:
            self._ticking.start(self.on_tick)

    def _look_at_myself(self) -> None:
        self._received.look()
        if self._limited and (self._late or self._age() > self._limit()):
            self._hang()

    def _look_at_stop(self) -> None:
        self._stop.look(due=time.monotonic() >= self._next_beat)

    def _pause(self) -> float:
        if (soon_s := self._stop.pause_s) is not None:
            return soon_s
        # Not after the limit but at it, and so before a collective gives up that began later.
        return min(TICK_S, max(0.01, self._limit() - self._age()))

    def _age(self) -> float:
        _, section, since, _ = self._at
        return time.monotonic() - (max(since, self._received.at) if section == RESTORE else since)

    def _limit(self) -> float:
        section = self._at[1]
        compiles = self._compiles and self._times[section] <= WARM_UP
        return self._limit_s * (COMPILE_PATIENCE if compiles else 1.0)

    def _beat(self) -> Beat:
        step, section, *_ = self._at
        frame = sys._current_frames().get(self._main)
        # A main thread whose own wait has come to its end waits for this thread to tell.
        idle = self._late or waits(frame)
        return Beat(step, section, self._age(), waits=idle, point=point(frame), spent=self._spent)

    def _look_at_others(self) -> None:
        """Say what this rank does, and hear what others want; more often as the end of the limit comes near."""
        if time.monotonic() < self._next_beat:
            return
        slow_s = min(SLOWEST_BEAT_S, max(1.0, self._limit_s / BEATS))
        near = self._age() > min(0.5 * self._limit_s, self._limit_s - 2 * slow_s)
        self._next_beat = time.monotonic() + (FASTEST_BEAT_S if near else slow_s)
        board = self._link.board
        if board is None:
            self._link.reach()
            return
        try:
            board.beat(self._beat())
            if self._at[1] == RESTORE:
                self._received.share(board)
            if self._stragglers is not None:
                for line in self._stragglers.tell(board.beats()):
                    say(line)
            if self._limited and board.calls() and board.hang_declared():
                self._hang()
        except RuntimeError:  # slow, or gone with its rank, and that will be noticed
            self._link.lose()

    def _tell_stop(self, why: str) -> None:
        self.on_stop(why)

    def _hang(self) -> None:
        """End the process: all ranks dump their stacks, the first to find the hang says who causes it."""
        self._hanging = True
        beat = self._beat()
        stacks.show()
        stacks.end_in(4 * PATIENCE_S + 2 * FILES_S)  # more than all that follows takes
        limit = f"recovery.hang_timeout_s={self._limit_s:g}"
        me = self._backend.rank
        verdict = f"{self._words(me)} did not get on within {limit} seconds: {beat}"
        with suppress(RuntimeError):  # the store went with its rank, and what is known here must do
            if (board := self._link.board) is not None:
                verdict = agree(board, beat, self._backend.world, self._words, limit) or verdict
        within(FILES_S, self._dump)
        within(FILES_S, lambda: self.on_hang(verdict))
        say(f"error: rank {me}: {verdict}. Stacks of all ranks: {self._logs}/hang-rank-*.txt")
        with suppress(OSError, ValueError):  # whoever read it may be gone
            sys.stdout.flush()
        os._exit(HangError.exit_code)

    def _dump(self) -> None:
        try:
            stacks.write(self._logs / f"hang-rank-{self._backend.rank}.txt")
        except OSError as error:
            say(f"rank {self._backend.rank}: its stacks are not in {self._logs}: {error}")
