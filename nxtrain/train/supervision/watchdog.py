"""Watchdog of a rank: a thread that publishes heartbeats, reads those of other ranks, and ends a run that hangs.

The main thread only records its position. A rank that holds Python's global interpreter lock (GIL) cannot run the
watchdog. A timer of the operating system ends such a rank, since it needs no GIL. While a checkpoint is restored, bytes
that any rank transfers count as progress.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.failures import call_with_timeout, loss
from nxtrain.common.distributed.heartbeats import PATIENCE_S, Beat, HeartbeatLink, HeartbeatStore
from nxtrain.common.errors import HangError, LostPeerError, StoppedBySignal, cause_of
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.io.checksummed_file import transferred
from nxtrain.common.process import stacks
from nxtrain.common.process.deadlines import SingleTask, first_use_limit_s
from nxtrain.common.process.signals import Signals
from nxtrain.common.process.stacks import print_line
from nxtrain.common.run_folder import RANKS_FILE
from nxtrain.metrics.run_observer import RunObserver, Work
from nxtrain.train.health.recompiles import WARM_UP
from nxtrain.train.supervision.coordinated_stop import StopCoordinator
from nxtrain.train.supervision.hang_diagnosis import agree, point, waits
from nxtrain.train.supervision.stragglers import Stragglers


class RestoreProgress:
    """Progress of restoring a checkpoint: bytes transferred by this rank and, through the store, by all others.

    Args:
        here: Returns the number of bytes that this process has received or sent.

    Attributes:
        at: Time of the last progress.
    """

    def __init__(self, here: Callable[[], int]) -> None:
        self._here = here
        self._seen = self._shared = self._all = 0
        self.at = time.monotonic()

    def poll(self) -> None:
        """Read the number of bytes that this process has transferred."""
        seen = self._here()
        if seen != self._seen:
            self._seen, self.at = seen, time.monotonic()

    def share(self, board: HeartbeatStore) -> None:
        """Publish the newly transferred bytes of this rank, and read the sum over all ranks."""
        new = self._seen - self._shared
        together = board.advance(new)
        self._shared += new
        if together != self._all:
            self._all, self.at = together, time.monotonic()


TICK_S = 0.25
"""Seconds between the watchdog's checks of its own rank."""

SLOWEST_BEAT_S, FASTEST_BEAT_S = 10.0, 0.5
"""Longest and shortest interval between heartbeats, in seconds."""

BEATS = 180
"""Number of heartbeats per time limit; few, since thousands of ranks share one store."""

FILES_S = 5.0
"""Seconds that writing each file of a hang's report may take, since a disk may be the cause of the hang."""

RESTORE: Work = "restore"
"""Work in which bytes transferred by any rank count as progress: slow storage is not a hang."""

REPEATED = {"data", "training"}
"""Kinds of work that occur in every step."""

FAILURE_S, REPORT_S = 2.0, 12.0
"""Seconds between checks for the failure of another rank, and seconds in which a rank reports its own failure."""

RANKS_S = 2.0
"""Shortest interval in seconds between writes of the file with all ranks' times."""


class Watchdog(RunObserver):
    """Watchdog of this rank and, together with the other ranks' watchdogs, of the run; used as a context.

    Args:
        backend: This rank's device.
        hang_timeout_s: Seconds without progress after which the run counts as hung.
        logs: Folder of the run's logs.
        signals: Stop signals that this process has received.
        has_agent: The parent process is an agent; this process ends when the agent is gone.
        keeps_state: This process continues with its state when another rank is lost.

    Attributes:
        gate: Gate before each step.
    """

    def __init__(
        self,
        backend: Backend,
        hang_timeout_s: float,
        logs: Path,
        signals: Signals,
        *,
        has_agent: bool = False,
        keeps_state: bool = False,
    ) -> None:
        self._observers = RunObserver()
        self._backend = backend
        self._limit_s = hang_timeout_s
        self._logs = logs
        self._signals = signals
        self._link = HeartbeatLink(backend.heartbeat_store())
        self._stop = StopCoordinator(backend.rank, backend.world, signals, self._link, self._report_stop)
        self.gate = self._stop.gate
        self._ticking, self._writing = SingleTask(), SingleTask()
        self._next_ranks_s = 0.0
        self._rank_name: Callable[[int], str] = "rank {}".format
        self._stragglers: Stragglers | None = None
        self._times: Counter[str] = Counter()
        self._spent: Callable[[], Mapping[str, float]] = dict
        self._counted: tuple[int, Mapping[str, float]] = (0, {})
        self._at = (0, "start", time.monotonic())
        self._finished = 0
        self._received = RestoreProgress(transferred)
        self._limited = not backend.extracts  # a run that extracts graphs is one long compilation
        self._late = self._hanging = False
        self._ended = threading.Event()
        self._next_beat = self._next_failure = 0.0
        self._failure_at: float | None = None
        self._keeps_state = keeps_state
        self._failures: set[str] = set()
        self._agent = os.getppid() if has_agent else None
        self._host = socket.gethostname()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="nxtrain-watchdog", daemon=True)
        stacks.answer_requests()

    @property
    def is_asked(self) -> bool:
        """True if this process received a stop signal, even if the run continues to its end."""
        return bool(self._signals.asked)

    def report_to(self, observers: RunObserver, spent: Callable[[], Mapping[str, float]] = dict) -> None:
        """Set the observers that the watchdog calls: `beat` repeatedly, `stopping` at a stop, and `end` at a hang.

        Args:
            observers: Observers of the run.
            spent: Returns this rank's seconds so far by kind of work; called from any thread.
        """
        self._observers, self._spent = observers, spent
        if self._stop.why:
            observers.stopping(self._stop.why)

    def enter(self, step: int, work: Work) -> None:
        if work not in REPEATED or self._times[work] <= WARM_UP:
            self._times[work] += 1
        self._at = (step, work, time.monotonic())
        if work == "training":  # at other points of a step, its seconds are counted in part
            self._counted = (step - 1, self._spent())

    def begin(self, finished: int) -> None:
        self._finished = finished

    def finish(self, step: int) -> None:
        self._finished = step

    def drain(self) -> None:
        """Record progress in the wait for the last checkpoint, or the start of the wait."""
        self.enter(self._finished, "checkpoint")

    def lay_out(self, rank_name: Callable[[int], str], stages: Sequence[int]) -> None:
        """Set the names of the ranks and their pipeline stages."""
        self._rank_name = rank_name
        if self._backend.rank == 0:
            self._stragglers = Stragglers(stages)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, StoppedBySignal):
            self._end()
            board = self._link.store
            if board is not None:  # other ranks need not wait for this rank, whose run ended normally
                with suppress(RuntimeError):  # the store ended together with its rank
                    board.answer(Beat(self._at[0], "end", 0.0, waits=True))
                    self._stop.publish_finished(board)
        elif isinstance(error, Exception):
            self.await_verdict(error)
            self._end()
        else:
            self._end()

    def await_verdict(self, error: Exception) -> None:
        """Wait for the watchdog to end a run that hangs, since its report has more detail; otherwise return at once.

        Args:
            error: Error that ended the run on this rank. For a hang this does not return, if the ranks share a store.
        """
        board = self._link.store
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

    def _end(self) -> None:
        self._ended.set()
        self._signals.news.set()
        self._thread.join(3 * PATIENCE_S)  # a blocked terminal, or a store that is slow more than once, may delay it
        stacks.dismiss()

    def _run(self) -> None:
        duties = (
            self._postpone_exit,
            self._check_agent,
            lambda: self._ticking.start(self._observers.beat),
            self._check_progress,
            lambda: self._stop.poll(due=time.monotonic() >= self._next_beat),
            self._exchange_heartbeats,
            self._check_failure,
        )
        try:
            while not self._ended.is_set():
                for duty in duties:
                    self._try(duty)
                self._signals.news.wait(self._pause())
                self._signals.news.clear()
        finally:
            stacks.dismiss()  # without this thread, nothing postpones the hard exit

    def _try(self, duty: Callable[[], None]) -> None:
        """Run one duty of the watchdog; its failure, such as a thread that cannot start, does not stop other duties."""
        try:
            duty()
        except Exception as error:
            if self._hanging:
                print_line(f"error: rank {self._backend.rank}: the run hangs; the watch fails too: {error}")
                os._exit(HangError.exit_code)
            failure = f"{type(error).__name__}: {error}"
            if failure not in self._failures:
                self._failures.add(failure)
                print_line(
                    f"warning: rank {self._backend.rank}: a part of its watch failed, and is tried again: {failure}"
                )

    def _postpone_exit(self) -> None:
        if self._limited:
            stacks.end_in(self._limit() + 2.0)  # ends a rank that holds the GIL, after other ranks have named it

    def _check_agent(self) -> None:
        if self._agent is not None and os.getppid() != self._agent:
            print_line(f"error: rank {self._backend.rank}: the agent that started it is gone, and it ends too")
            os._exit(1)

    def _check_progress(self) -> None:
        self._received.poll()
        if self._limited and (self._late or self._age() > self._limit()):
            self._hang()

    def _pause(self) -> float:
        soon_s = self._stop.pause_s
        if soon_s is not None:
            return soon_s
        # Wake exactly at the limit, before a collective that began later times out.
        return min(TICK_S, max(0.01, self._limit() - self._age()))

    def _age(self) -> float:
        _, section, since = self._at
        if section == RESTORE:
            since = max(since, self._received.at)
        return time.monotonic() - since

    def _limit(self) -> float:
        section = self._at[1]
        compiles = self._backend.compiles_at_first_use and self._times[section] <= WARM_UP
        return first_use_limit_s(self._limit_s) if compiles else self._limit_s

    def _beat(self) -> Beat:
        step, section, *_ = self._at
        frame = sys._current_frames().get(self._main)
        # After its own timeout the main thread waits for this thread's report.
        idle = self._late or waits(frame)
        where = point(frame)
        counted, spent = self._counted
        return Beat(step, section, self._age(), waits=idle, point=where, counted=counted, spent=spent, host=self._host)

    def _exchange_heartbeats(self) -> None:
        """Publish this rank's heartbeat and read the other ranks' state, more often near the end of the time limit."""
        if time.monotonic() < self._next_beat:
            return
        slow_s = min(SLOWEST_BEAT_S, max(1.0, self._limit_s / BEATS))
        near = self._age() > min(0.5 * self._limit_s, self._limit_s - 2 * slow_s)
        self._next_beat = time.monotonic() + (FASTEST_BEAT_S if near else slow_s)
        board = self._link.store
        if board is None:
            self._link.reach()
            return
        try:
            board.beat(self._beat())
            if self._at[1] == RESTORE:
                self._received.share(board)
            if self._stragglers is not None:
                for line in self._stragglers.changes(board.beats()):
                    print_line(line)
                self._publish_rates(self._stragglers)
            if self._limited and board.calls() and board.hang_declared():
                self._hang()
        except RuntimeError:  # the store is slow or ended; a lost rank is found elsewhere
            self._link.lose()

    def _check_failure(self) -> None:
        """End a rank whose device waits for a failed rank, since the main thread never learns of the failure.

        A rank that keeps its state only aborts the waits of its device.
        """
        board, now_s = self._link.store, time.monotonic()
        if not self._backend.is_asynchronous or board is None or now_s < self._next_failure:
            return
        self._next_failure = now_s + FAILURE_S
        try:
            failure = board.failure()
        except RuntimeError:  # as in `_exchange_heartbeats`
            return
        if not failure:
            return
        if self._keeps_state:
            if self._failure_at is None:
                self._failure_at = now_s
                self._backend.abandon(failure)
            return
        if self._failure_at is None:
            self._failure_at = now_s
        if now_s < self._failure_at + REPORT_S or not waits(sys._current_frames().get(self._main)):
            return
        stacks.end_in(3 * FILES_S)
        call_with_timeout(FILES_S, lambda: self._observers.end("failed", failure))
        me = self._backend.rank
        print_line(f"error: rank {me}: {failure}\n{self._rank_name(me)} needs it, and ends too: its device waits")
        os._exit(LostPeerError.exit_code)

    def _publish_rates(self, stragglers: Stragglers) -> None:
        """Write the file of all ranks' times, on a thread that a disk may block."""
        now_s = time.monotonic()
        if now_s < self._next_ranks_s or not stragglers.rates:
            return
        self._next_ranks_s = now_s + RANKS_S
        rates: dict[int, dict[str, float]] = {}
        for rank, rate in stragglers.rates.items():
            rates[rank] = {kind: round(s, 6) for kind, s in rate.items()}

        def write() -> None:
            with suppress(OSError):
                replace_text(self._logs / RANKS_FILE, json.dumps(rates) + "\n", durable=False)

        with suppress(RuntimeError):  # no thread can start, which must not count as a lost store
            self._writing.start(write)

    def _report_stop(self, why: str) -> None:
        self._observers.stopping(why)

    def _hang(self) -> None:
        """End the process after a hang: all ranks dump their stacks, and the first rank to find it names the cause."""
        self._hanging = True
        beat = self._beat()
        stacks.show()
        stacks.end_in(4 * PATIENCE_S + 3 * FILES_S)  # longer than all of the following takes
        beat = replace(beat, queued=call_with_timeout(FILES_S, self._backend.diagnostics.queued) or {})
        limit = f"recovery.hang_timeout_s={self._limit_s:g}"
        me = self._backend.rank
        verdict = f"{self._rank_name(me)} did not get on within {limit} seconds: {beat}"
        with suppress(RuntimeError):  # the store ended with its rank, so this rank's own verdict is kept
            board = self._link.store
            if board is not None:
                verdict = agree(board, beat, self._backend.world, self._rank_name, limit) or verdict
        call_with_timeout(FILES_S, self._dump)
        call_with_timeout(FILES_S, lambda: self._observers.end("failed", verdict))
        print_line(f"error: rank {me}: {verdict}. Stacks of all ranks: {self._logs}/hang-rank-*.txt")
        with suppress(OSError, ValueError):  # the reader of the pipe may be gone
            sys.stdout.flush()
        os._exit(HangError.exit_code)

    def _dump(self) -> None:
        try:
            stacks.write(self._logs / f"hang-rank-{self._backend.rank}.txt")
            recording = self._backend.diagnostics.recording()
            if recording:
                (self._logs / f"hang-rank-{self._backend.rank}-nccl.pickle").write_bytes(recording)
        except OSError as error:
            print_line(f"rank {self._backend.rank}: its stacks are not in {self._logs}: {cause_of(error)}")
