"""Clocks of a measurement: wall, CPU time of this process, and the device's own where it has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
        first = self._event()
        wall, cpu = time.perf_counter(), time.process_time()
        yield seconds
        seconds["cpu"] = time.process_time() - cpu
        seconds["wall"] = time.perf_counter() - wall
        last = self._event()
        if first is not None and last is not None:
            last.synchronize()
            seconds["device"] = first.elapsed_time(last) / 1e3

    def _event(self) -> torch.Event | None:
        if not self.has_events:
            return None
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event
