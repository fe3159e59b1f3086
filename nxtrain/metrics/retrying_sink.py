"""Sink that retries failed writes: training goes on, and records wait in memory until the disk accepts them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from nxtrain.common.process.console import standard_error
from nxtrain.metrics.meters import Clock

KEPT = 10_000
"""Most records that wait in memory; the oldest are dropped first."""

REST = 20.0
"""Pause before a retry, in durations of the failed try. Failing writes thus take at most 1/20 of the time."""


class Sink(Protocol):
    """Receiver of step records."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record; `step` is among its keys, None means unknown, and values need not be numbers."""
        ...

    def close(self) -> None:
        """Make all records durable, and release files and screen."""
        ...


class RetryingSink:
    """Wrapper that reopens a sink after a failure, at the last step that was written.

    Messages report the begin and the end of a failure, not each step between them.
    """

    def __init__(
        self, name: str, open_after: Callable[[int], Sink], resume_step: int, clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._open_after = open_after
        self._last = resume_step
        self._clock = clock
        self._sink: Sink | None = None
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._num_lost = 0
        self._in_trouble = False
        self._again_s = clock()
        self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        """Add one record, and write it now or later."""
        if len(self._waiting) == KEPT:
            self._waiting.popleft()
            self._num_lost += 1
        self._waiting.append(record)
        if self._clock() >= self._again_s:
            self._write()

    def close(self) -> None:
        """Try once more to write the waiting records, and close the sink."""
        if self._waiting:
            self._write()
        missing = len(self._waiting) + self._num_lost
        if missing:
            _print_line(f"warning: {missing} records are missing in {self.name}, which could not be written")
        self._close_sink()

    def _write(self) -> None:
        began_s = self._clock()
        try:
            if self._sink is None:
                self._sink = self._open_after(self._last)
            while self._waiting:
                self._sink.log(self._waiting[0])
                self._last = int(self._waiting.popleft()["step"])
        except OSError as error:
            self._close_sink()
            now_s = self._clock()
            self._again_s = now_s + REST * (now_s - began_s)
            if not self._in_trouble:
                why = error.strerror or str(error)
                _print_line(
                    f"warning: {self.name} cannot be written: {why}; training goes on, and its records wait in memory"
                )
            self._in_trouble = True
        else:
            if self._in_trouble:
                _print_line(f"{self.name} is written again, up to step {self._last}")
            self._in_trouble = False

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(OSError):  # its buffered records are written again, or are reported as missing
                sink.close()


def refuse_deleted(descriptor: int, path: object) -> None:
    """Refuse to write to an open file that has no name any more."""
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(f"{path} was deleted")


def _print_line(line: str) -> None:
    standard_error().print(line, markup=False)
