"""Sinks that outlive the trouble of their disk: training goes on, and what could not be written is written later."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nxtrain.metrics.meters import Clock
from nxtrain.process.screen import standard_error

if TYPE_CHECKING:
    from nxtrain.metrics.sinks import Sink

KEPT = 10_000
"""Records that wait in memory, at most; older ones are given up first."""

REST = 20.0
"""Times as long as a failed try took passes before the next: trouble costs training a twentieth of its time at most."""


class Lasting:
    """A sink that is opened anew after a failure, behind the last step that it took.

    A failure is told when it begins and when it ends, not at each step between.

    Args:
        name: What messages call it.
        open_after: Opens the sink, which forgets what it holds of later steps.
        resume_step: Last step that stands.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, name: str, open_after: Callable[[int], Sink], resume_step: int, clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._open_after, self._last, self._clock = open_after, resume_step, clock
        self._sink: Sink | None = None
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._num_lost = 0
        self._in_trouble = False
        self._again_s = clock()
        self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record, and write it now or later."""
        if len(self._waiting) == KEPT:
            self._waiting.popleft()
            self._num_lost += 1
        self._waiting.append(record)
        if self._clock() >= self._again_s:
            self._write()

    def close(self) -> None:
        """Try once more to write what waits, and let go of the sink."""
        if self._waiting:
            self._write()
        if missing := len(self._waiting) + self._num_lost:
            _tell(f"warning: {missing} records are missing in {self.name}, which could not be written")
        self._let_go()

    def _write(self) -> None:
        began_s = self._clock()
        try:
            if self._sink is None:
                self._sink = self._open_after(self._last)
            while self._waiting:
                self._sink.log(self._waiting[0])
                self._last = int(self._waiting.popleft()["step"])
        except OSError as error:
            self._let_go()
            now_s = self._clock()
            self._again_s = now_s + REST * (now_s - began_s)
            if not self._in_trouble:
                why = error.strerror or str(error)
                _tell(
                    f"warning: {self.name} cannot be written: {why}; training goes on, and its records wait in memory"
                )
            self._in_trouble = True
        else:
            if self._in_trouble:
                _tell(f"{self.name} is written again, up to step {self._last}")
            self._in_trouble = False

    def _let_go(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(OSError):  # what it still holds is written anew, or was told to be missing
                sink.close()


def refuse_deleted(descriptor: int, path: object) -> None:
    """Refuse to write into a file that nobody can find any more.

    Raises:
        FileNotFoundError: Its last name is gone.
    """
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(f"{path} was deleted")


def _tell(line: str) -> None:
    standard_error().print(line, markup=False)
