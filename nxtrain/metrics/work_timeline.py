"""Timelines of a rank's kinds of work, by the host's clock or by events in the device's queue.

Each moment belongs to one kind, so that the kinds add up to the time that has passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nxtrain.metrics.meters import Clock

if TYPE_CHECKING:
    from nxtrain.backends.diagnostics import DeviceEvent

WAITING = "waiting"
"""Kind of the waits for other ranks, which count for no other kind."""


class WorkTimeline(Protocol):
    """Seconds by kind of work.

    Attributes:
        spent: Seconds of each kind so far, without those of the open piece.
    """

    spent: dict[str, float]

    def enter(self, kind: str) -> None:
        """Begin a piece of work; the piece before has ended."""
        ...

    def settle(self) -> None:
        """Count the open piece up to this moment."""
        ...


class HostTimeline:
    """Timeline by the host's clock; a piece costs two clock reads."""

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
    """Timeline by events in the queue of a device: the time until the device reaches the next piece.

    Work of the host that the device does not wait for takes no time here. A wait of the queue for other ranks begins
    and ends with `wait`.
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
        """Begin or end a wait for other ranks; the piece of work around the wait goes on."""
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
