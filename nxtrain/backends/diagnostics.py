"""Measurements of a device, and recordings of its work; independent of any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nxtrain.common.distributed.heartbeats import Queued


class DeviceEvent(Protocol):
    """Event in the queue of a device, with the interface of torch's events."""

    def query(self) -> bool:
        """True if the device has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""
        ...

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        """Milliseconds from this event to a later one, both reached."""
        ...


class Diagnostics:
    """Measurements and recordings of a device; this base class is for a device without any."""

    def peak_flops(self, params: str = "bf16") -> float | None:
        """Dense operations per second of one device, by its maker's figures; None if unknown.

        Args:
            params: `precision.params`; a device with one rate for all types ignores this.
        """
        return None

    def peak_memory_bytes(self) -> int:
        """Peak device memory of this rank in bytes; 0 if unknown."""
        return 0

    def bf16_warning(self) -> str:
        """Warning for a run whose products are in bf16, on a device without them; empty if the device has them."""
        return ""

    def num_compiled(self) -> int:
        """Number of graphs that this process has compiled so far; 0 on eager devices. The call costs nothing."""
        return 0

    def fallbacks(self) -> tuple[str, ...]:
        """Operations that ran on the host since `forget_fallbacks`, because the device lacks them."""
        return ()

    def forget_fallbacks(self) -> None:
        """Clear the list of `fallbacks`."""

    def waited_s(self) -> float:
        """Seconds that this rank's host has waited for other ranks so far; 0 if unknown."""
        return 0.0

    def event(self) -> DeviceEvent | None:
        """Put an event with a time into the device's queue; None: the device has no such events."""
        return None

    def on_wait(self, note: Callable[[bool], None]) -> None:
        """Call a function with True when the queue begins to wait for other ranks, and with False when it goes on."""

    def profiler_options(self, profiles: Path) -> tuple[dict[str, Any], str]:
        """Arguments with which torch's profiler records this device too, and a message about the device's part.

        Args:
            profiles: Folder of the run's profiles.
        """
        return {}, ""

    def finish_profiled(self) -> None:
        """Wait until the device has done the work that is profiled; does nothing where torch's profiler waits."""

    def queued(self) -> Mapping[str, Queued]:
        """Newest collectives of this rank by communicator; none on devices without a recording."""
        return {}

    def recording(self) -> bytes:
        """Recording of the newest collectives in torch's format; empty on devices without one."""
        return b""

    def watch_memory(self) -> None:
        """Record each allocation of the device with its stack from now on, for `dump_memory`."""

    def dump_memory(self, file: Path) -> bool:
        """Write a snapshot of the device's memory; False: the device has none."""
        return False
