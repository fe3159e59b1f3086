"""Clocks of the benchmarks: wall time, CPU time of this process, and the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nxtrain.backends.base import Backend


class Clocks:
    """Wall, CPU and device clocks for measurements on one device.

    Attributes:
        read: Function that runs all recorded operations, waits for the device, and returns the value of a () tensor.
        has_events: True if the device has an operation queue and its own clock, so that timed events can be queued.
    """

    def __init__(self, device: torch.device, read: Callable[[Tensor], float] = float) -> None:
        self.device, self.read = device, read
        self.has_events = device.type not in ("cpu", "xla")

    @contextmanager
    def measure(self) -> Iterator[dict[str, float]]:
        """Measure the seconds of a context by each clock.

        The returned dictionary is filled when the context ends. The device must be idle before and after the context.
        """
        seconds: dict[str, float] = {}
        first = self.event()
        wall, cpu = time.perf_counter(), time.process_time()
        yield seconds
        seconds["cpu"] = time.process_time() - cpu
        seconds["wall"] = time.perf_counter() - wall
        last = self.event()
        if first is not None and last is not None:
            last.synchronize()
            seconds["device"] = first.elapsed_time(last) / 1e3

    def event(self) -> torch.Event | None:
        """Record a timed event in the device's queue; None if the device has no queue."""
        if not self.has_events:
            return None
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


def clocks_of(backend: Backend) -> Clocks:
    """Create the clocks of a backend's device."""

    def read(x: Tensor) -> float:
        backend.step_boundary()
        return backend.fetch({"x": x})["x"]

    return Clocks(backend.device, read)


class Timestamps:
    """Timestamps of one process, on the monotonic clock that all processes of a machine share.

    If the device has a queue, timestamps come from events in the queue, at the time the device reaches the event.

    Args:
        clocks: Clocks of the device.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._events: list[torch.Event] = []
        self._times_s: list[float] = []

    def begin(self) -> None:
        """Discard all timestamps and record the first one; the device must be idle."""
        self._events.clear()
        self._times_s.clear()
        self.mark()
        if self._events:
            self._events[0].synchronize()
            self._times_s[0] = time.monotonic()

    def mark(self) -> int:
        """Record a timestamp, and return its index."""
        self._times_s.append(time.monotonic())
        event = self._clocks.event()
        if event is not None:
            self._events.append(event)
        return len(self._times_s) - 1

    def times_s(self) -> list[float]:
        """Return all timestamps in seconds, after waiting until the device has reached the last event."""
        if not self._events:
            return list(self._times_s)
        first = self._events[0]
        self._events[-1].synchronize()
        return [self._times_s[0] + first.elapsed_time(event) / 1e3 for event in self._events]
