"""Clocks of a measurement: wall, CPU time of this process, and the device's own where it has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nxtrain.backends.base import Backend


class Clocks:
    """Clocks of one device; `read` runs the recorded operations, waits for the device, and reads a () tensor.

    Attributes:
        has_events: The device has a queue, and a clock of its own.
    """

    def __init__(self, device: torch.device, read: Callable[[Tensor], float] = float) -> None:
        self.device, self.read = device, read
        self.has_events = device.type not in ("cpu", "xla") and hasattr(torch, "Event")

    @contextmanager
    def measure(self) -> Iterator[dict[str, float]]:
        """Seconds by clock, filled in when the context ends; the device must be idle before and after."""
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
        """Event with a time, put into the device's queue; None: the device has none."""
        if not self.has_events:
            return None
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


def clocks_of(backend: Backend) -> Clocks:
    """Clocks of a backend's device."""

    def read(x: Tensor) -> float:
        backend.step_boundary()
        return backend.fetch({"x": x})["x"]

    return Clocks(backend.device, read)


class Moments:
    """Moments of one process on the clock that all processes of a machine share.

    On a device with a queue, a moment is that at which the device gets there, by events in the queue.

    Args:
        clocks: Clocks of the device.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._events: list[torch.Event] = []
        self._times_s: list[float] = []

    def begin(self) -> None:
        """Restart the clocks, once the device is idle."""
        self._events.clear()
        self._times_s.clear()
        self.mark()
        if self._events:
            self._events[0].synchronize()
            self._times_s[0] = time.monotonic()

    def mark(self) -> int:
        """Add a moment, and return its number."""
        self._times_s.append(time.monotonic())
        event = self._clocks.event()
        if event is not None:
            self._events.append(event)
        return len(self._times_s) - 1

    def times_s(self) -> list[float]:
        """Seconds of all moments, once the device has reached the last."""
        if not self._events:
            return list(self._times_s)
        first = self._events[0]
        self._events[-1].synchronize()
        return [self._times_s[0] + first.elapsed_time(event) / 1e3 for event in self._events]
