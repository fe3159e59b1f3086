"""Meter of a rank's peak memory, and of its time by kind of work and by section of the step.

All time between two records counts for exactly one kind, so that the kinds add up to the time between the records.
Sections are parts of `training`. On asynchronous devices, the host's clock measures the device's work as waits for
metric values. There, a timeline of device events divides the device's time instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, get_args

from nxtrain.metrics.meters import Clock
from nxtrain.metrics.run_observer import RunObserver, Section, Work

if TYPE_CHECKING:
    from nxtrain.backends.diagnostics import DeviceEvent

WAITING = "waiting"
"""Kind of the time that a rank waits for other ranks, which counts for no other kind."""


class WorkTimeline(Protocol):
    """Timeline that measures seconds by kind of work.

    Attributes:
        spent: Seconds of each kind so far, without the current piece of work.
    """

    spent: dict[str, float]

    def enter(self, kind: str) -> None:
        """Begin a piece of work; the previous piece has ended."""
        ...

    def settle(self) -> None:
        """Count the current piece of work up to now."""
        ...


class HostTimeline:
    """Timeline by the host's clock; a piece of work costs two clock reads."""

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0, clock: Clock = time.monotonic) -> None:
        self._waited_s, self._clock = waited_s, clock
        self._kind = ""
        self.spent: dict[str, float] = {WAITING: 0.0}
        self._since_s, self._since_waited_s = clock(), waited_s()

    def enter(self, kind: str) -> None:
        self.settle()
        self._kind = kind

    def settle(self) -> None:
        now_s, waited_s = self._clock(), self._waited_s()
        waited = min(waited_s - self._since_waited_s, now_s - self._since_s)
        self.spent[WAITING] += waited
        self.spent[self._kind] = self.spent.get(self._kind, 0.0) + now_s - self._since_s - waited
        self._since_s, self._since_waited_s = now_s, waited_s


class EventTimeline:
    """Timeline by events in a device queue: a piece lasts until the device reaches the next piece.

    Host work that the device does not wait for takes no time here. `wait` marks the beginning and the end of a wait of
    the queue for other ranks.
    """

    def __init__(self, record: Callable[[], DeviceEvent]) -> None:
        self._record = record
        self.spent: dict[str, float] = {WAITING: 0.0}
        self._pieces: deque[tuple[str, DeviceEvent]] = deque([("", record())])
        self._around = ""

    def enter(self, kind: str) -> None:
        self._pieces.append((kind, self._record()))
        while len(self._pieces) > 1 and self._pieces[1][1].query():
            self._count()

    def wait(self, begins: bool) -> None:
        """Begin or end a wait for other ranks inside the current piece of work."""
        if begins:
            self._around = self._pieces[-1][0]
            self.enter(WAITING)
        else:
            self.enter(self._around)

    def settle(self) -> None:
        self.enter(self._pieces[-1][0])
        self._pieces[-1][1].synchronize()
        while len(self._pieces) > 1:
            self._count()

    def _count(self) -> None:
        kind, began = self._pieces.popleft()
        self.spent[kind] = self.spent.get(kind, 0.0) + began.elapsed_time(self._pieces[0][1]) / 1e3


KINDS = ("data", "training", "vote", "log", "evaluation", "checkpoint")
"""Kinds of work of a step. The record key of each kind ends in `_s`."""

SECTIONS: tuple[str, ...] = get_args(Section)
"""Sections of `training`, with record keys like those of kinds, where the timeline measures sections."""

SAME_WORK = ("data", "training", *SECTIONS)
"""Kinds of work that are equal on all ranks of a stage, so that their times can be compared."""


class WorkMeter(RunObserver):
    """Observer that measures seconds by kind of work, by default on the host's clock, without waits and peak memory."""

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
        """Seconds of each kind so far, without the current piece of work; callable from any thread."""
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
