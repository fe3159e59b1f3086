"""Meter of the host's time by kind of work, and of the peak memory, for the records of steps.

Each moment between two records counts for one kind, so that the kinds add up to the time between the records. On
devices that compute asynchronously, the host waits for the device while it reads numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from nxtrain.metrics.meters import Clock
from nxtrain.metrics.run_observer import RunObserver, Work

KINDS = ("data", "training", "vote", "log", "evaluation", "checkpoint")
"""Kinds of work of a step; each has a key in the records, with `_s` behind."""

WAITING = "waiting"
"""Waiting for other ranks, which counts for no other kind."""


class WorkMeter(RunObserver):
    """Counts seconds by kind of work; one call takes two clock reads.

    Args:
        waited_s: Returns the seconds that the host has waited for other ranks so far.
        peak_memory_bytes: Returns the peak memory of this rank; 0 if unknown.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        waited_s: Callable[[], float] = lambda: 0.0,
        peak_memory_bytes: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._waited_s, self._peak_memory_bytes, self._clock = waited_s, peak_memory_bytes, clock
        self._work = ""
        self._spent: dict[str, float] = {}
        self._since_s, self._since_waited_s = clock(), waited_s()

    def begin(self, finished: int) -> None:
        self._settle()
        self._spent.clear()

    def enter(self, step: int, work: Work) -> None:
        self._settle()
        self._work = work

    def measure(self, step: int) -> Mapping[str, float]:
        self._settle()
        # Time before the first kind of work, and of kinds that no record has, is part of training.
        found = {f"{kind}_s": self._spent.get(kind, 0.0) for kind in (*KINDS, WAITING)}
        found["training_s"] += sum(spent for kind, spent in self._spent.items() if kind not in (*KINDS, WAITING))
        self._spent.clear()
        if peak := self._peak_memory_bytes():
            found["peak_memory_bytes"] = peak
        return found

    def _settle(self) -> None:
        """Count the time since the last call to the present kind of work."""
        now_s, waited_s = self._clock(), self._waited_s()
        waited = min(waited_s - self._since_waited_s, now_s - self._since_s)
        self._spent[WAITING] = self._spent.get(WAITING, 0.0) + waited
        self._spent[self._work] = self._spent.get(self._work, 0.0) + now_s - self._since_s - waited
        self._since_s, self._since_waited_s = now_s, waited_s
