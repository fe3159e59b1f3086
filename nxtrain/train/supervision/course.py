"""How far a run is, told to whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from nxtrain.errors import NxtrainError, StoppedBySignal
from nxtrain.metrics.attempts import Attempts, Reached
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.process.screen import standard_error
from nxtrain.run_folder import LOGS_DIR
from nxtrain.train.supervision.watchdog import Watchdog
from nxtrain.train.trainer import Work


class Course:
    """The steps of one start, as a context.

    Args:
        resumed: The step after which it goes on.
        watchdog: Watches this rank; None: nobody does.
        attempts: The starts of the run, on its leader.
        goodput: What becomes of its time, on its leader.
        reached: How far it is, on a rank of each other disk: each node's launcher counts restarts by its own.
        explain: Finds out what was behind an error of a library, such as that of a connection.
    """

    def __init__(
        self,
        resumed: int,
        watchdog: Watchdog | None,
        attempts: Attempts | None,
        goodput: GoodputMeter | None,
        reached: Reached | None = None,
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._reached, self._explain = reached, explain
        self._finished, self._watchdog, self._attempts, self._goodput = resumed, watchdog, attempts, goodput

    def enter(self, step: int, work: Work) -> None:
        """Begin some work of a step."""
        if self._goodput is not None:
            self._goodput.enter(step, work)
        if self._watchdog is not None:
            self._watchdog.enter(step, work)

    def stops(self, step: int) -> bool:
        """Whether the run stops after a step that is finished; if not, the wait for data begins."""
        self._finished = step
        if self._goodput is not None:
            self._goodput.finish(step)
        if self._watchdog is None:
            return False
        if self._watchdog.gate.stops(step):
            return True
        self._watchdog.enter(step + 1, "data")
        return False

    def close(self) -> None:
        """The steps are over, and the last checkpoint is waited for."""
        if self._watchdog is not None:
            self._watchdog.enter(self._finished, "checkpoint")

    def __enter__(self) -> None:
        attempts = self._attempts
        if attempts is None:
            self._tell_reached()
            if self._watchdog is not None and self._reached is not None:
                self._watchdog.on_tick = self._tell_reached
            return
        try:
            attempts.begin(self._finished)
        except OSError as error:  # only what a loop of crashes is told by is lost
            _tell(f"warning: this start is not noted in run.dir/{LOGS_DIR}: {error.strerror}; training goes on")
        if self._goodput is not None:
            self._goodput.begin(self._finished)
        if self._watchdog is not None:
            self._watchdog.on_tick = lambda: self._refresh(attempts)
            self._watchdog.on_stop = lambda why: _note(attempts, "stopped", self._finished, why)
            if self._watchdog.stopped_by:
                self._watchdog.on_stop(self._watchdog.stopped_by)
            self._watchdog.on_hang = lambda verdict: self._end(attempts, "failed", verdict)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._attempts is None:
            self._tell_reached(now=True)
            return
        if error is None:
            self._end(self._attempts, "done", "")
        else:
            outcome = "stopped" if isinstance(error, StoppedBySignal) else "failed"
            if isinstance(error, Exception) and not isinstance(error, NxtrainError):
                error = self._explain(error)
            self._end(self._attempts, outcome, f"{type(error).__name__}: {error}")

    def _tell_reached(self, *, now: bool = False) -> None:
        if self._reached is not None:
            with suppress(OSError):  # as where the leader cannot
                self._reached.note(self._finished, now=now)

    def _refresh(self, attempts: Attempts) -> None:
        with suppress(OSError):  # a full or vanished disk is told by who saves, and must not end the watch
            attempts.reach(self._finished)
        if self._goodput is not None:
            self._goodput.beat()

    def _end(self, attempts: Attempts, outcome: str, why: str) -> None:
        _note(attempts, outcome, self._finished, why)
        if self._goodput is not None:
            self._goodput.end(outcome)


def _note(attempts: Attempts, outcome: str, step: int, why: str) -> None:
    with suppress(OSError):
        attempts.end(outcome, step, why)


def _tell(line: str) -> None:
    standard_error().print(line, markup=False)
