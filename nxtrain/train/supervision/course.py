"""Progress of a run, reported to its watchdog, its start log and its goodput meter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from nxtrain.errors import NxtrainError, StoppedBySignal
from nxtrain.metrics.attempts import Attempts, Reached
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.process.console import standard_error
from nxtrain.run_folder import LOGS_DIR
from nxtrain.train.supervision.watchdog import Watchdog
from nxtrain.train.trainer import Work


class Course:
    """Progress of one start of a run, as a context.

    Args:
        resumed: The step after which the start continues.
        watchdog: Watchdog of this rank; None: there is none.
        attempts: Log of the run's starts, on its leader.
        goodput: Goodput meter, on the leader.
        reached: File of the last finished step, on one rank per other disk: each node's launcher reads its own disk.
        explain: Returns the error behind a library's error, such as a lost connection.
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
        """Begin a piece of work of a step."""
        if self._goodput is not None:
            self._goodput.enter(step, work)
        if self._watchdog is not None:
            self._watchdog.enter(step, work)

    def stops(self, step: int) -> bool:
        """True if the run stops after a finished step; otherwise the wait for data begins."""
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
        """Enter the wait for the last checkpoint, after the last step."""
        if self._watchdog is not None:
            self._watchdog.enter(self._finished, "checkpoint")

    def __enter__(self) -> None:
        attempts = self._attempts
        if attempts is None:
            self._write_reached()
            if self._watchdog is not None and self._reached is not None:
                self._watchdog.on_tick = self._write_reached
            return
        try:
            attempts.begin(self._finished)
        except OSError as error:  # only the detection of crash loops is lost
            _print_line(f"warning: this start is not noted in run.dir/{LOGS_DIR}: {error.strerror}; training goes on")
        if self._goodput is not None:
            self._goodput.begin(self._finished)
        if self._watchdog is not None:
            self._watchdog.on_tick = lambda: self._refresh(attempts)
            self._watchdog.on_stop = lambda why: _write_end(attempts, "stopped", self._finished, why)
            if self._watchdog.stopped_by:
                self._watchdog.on_stop(self._watchdog.stopped_by)
            self._watchdog.on_hang = lambda verdict: self._end(attempts, "failed", verdict)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._attempts is None:
            self._write_reached(now=True)
            return
        if error is None:
            self._end(self._attempts, "done", "")
        else:
            outcome = "stopped" if isinstance(error, StoppedBySignal) else "failed"
            if isinstance(error, Exception) and not isinstance(error, NxtrainError):
                error = self._explain(error)
            self._end(self._attempts, outcome, f"{type(error).__name__}: {error}")

    def _write_reached(self, *, now: bool = False) -> None:
        if self._reached is not None:
            with suppress(OSError):  # as on the leader, a disk that fails must not end the run
                self._reached.note(self._finished, now=now)

    def _refresh(self, attempts: Attempts) -> None:
        with suppress(OSError):  # a full or vanished disk is reported by the save, and must not end the watch
            attempts.reach(self._finished)
        if self._goodput is not None:
            self._goodput.beat()

    def _end(self, attempts: Attempts, outcome: str, why: str) -> None:
        _write_end(attempts, outcome, self._finished, why)
        if self._goodput is not None:
            self._goodput.end(outcome)


def _write_end(attempts: Attempts, outcome: str, step: int, why: str) -> None:
    with suppress(OSError):
        attempts.end(outcome, step, why)


def _print_line(line: str) -> None:
    standard_error().print(line, markup=False)
