"""Meter of a rank's peak memory, and of its time by kind of work and section of the step.

Each moment between two records counts for one kind, so that the kinds add up to the time between the records. Sections
are parts of `training`. On devices that compute asynchronously, the host's clock sees the device's work as waits while
numbers are read. There a timeline of events divides the time of the device instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from nxtrain.metrics.run_observer import RunObserver, Section, Work
from nxtrain.metrics.work_timeline import WAITING, HostTimeline, WorkTimeline

KINDS = ("data", "training", "vote", "log", "evaluation", "checkpoint")
"""Kinds of work of a step; the key of a kind in the records ends in `_s`."""

SECTIONS: tuple[str, ...] = get_args(Section)
"""Sections of `training`; a section has a key of the same form, where the timeline measures sections."""

SAME_WORK = ("data", "training", *SECTIONS)
"""Kinds that are equal work on all ranks of a stage, so that their times can be compared."""


class WorkMeter(RunObserver):
    """Counts seconds by kind of work; by default on the host's clock, without waits and peak memory."""

    def __init__(self, timeline: WorkTimeline | None = None, peak_memory_bytes: Callable[[], int] = lambda: 0) -> None:
        self._timeline, self._peak_memory_bytes = timeline or HostTimeline(), peak_memory_bytes
        self._recorded: dict[str, float] = {}

    def begin(self, finished: int) -> None:
        self._timeline.settle()
        self._recorded = self.spent()

    def enter(self, step: int, work: Work) -> None:
        self._timeline.enter(work)

    def section(self, name: Section) -> None:
        self._timeline.enter(name)

    def spent(self) -> dict[str, float]:
        """Seconds of each kind so far, without those of the open piece; callable from any thread."""
        return dict(self._timeline.spent)

    def measure(self, step: int) -> Mapping[str, float]:
        self._timeline.settle()
        spent = self.spent()
        since = {kind: total_s - self._recorded.get(kind, 0.0) for kind, total_s in spent.items()}
        self._recorded = spent
        measured = {f"{kind}_s": since.get(kind, 0.0) for kind in (*KINDS, WAITING)}
        # Time before the first kind of work, and of kinds that no record has, is part of training.
        measured["training_s"] += sum(s for kind, s in since.items() if kind not in (*KINDS, WAITING))
        measured |= {f"{name}_s": since[name] for name in SECTIONS if name in since}
        peak = self._peak_memory_bytes()
        if peak:
            measured["peak_memory_bytes"] = peak
        return measured
