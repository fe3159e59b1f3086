"""Interface for a device's memory, speed, timing events and recorded collectives; independent of any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nxtrain.common.distributed.heartbeats import Queued


class DeviceEvent(Protocol):
    """Timing event in the queue of a device, with the interface of `torch.cuda.Event`."""

    def query(self) -> bool:
        """True if the device has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""
        ...

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        """Milliseconds from this event to a later event; the device has reached both."""
        ...


class Diagnostics:
    """Measurements and recordings of a device; this base class is for devices that measure nothing."""

    def peak_flops(self, params: str = "bf16") -> float | None:
        """Peak dense FLOP/s of one device according to its vendor; None if unknown.

        Args:
            params: Value of `precision.params`; a device with one rate for all types ignores it.
        """
        return None

    def peak_memory_bytes(self) -> int:
        """Peak device memory of this rank in bytes; 0 if unknown."""
        return 0

    def bf16_warning(self) -> str:
        """Warning about bf16 on a device without bf16 matrix products; empty if the device has them."""
        return ""

    def num_compiled(self) -> int:
        """Number of graphs that this process has compiled so far; 0 on eager devices. The call is cheap."""
        return 0

    def fallbacks(self) -> tuple[str, ...]:
        """Names of operations that ran on the host since `forget_fallbacks`, since the device lacks a kernel."""
        return ()

    def forget_fallbacks(self) -> None:
        """Clear the list that `fallbacks` returns."""

    def waited_s(self) -> float:
        """Seconds that this rank's host has waited for other ranks so far; 0 if unknown."""
        return 0.0

    def event(self) -> DeviceEvent | None:
        """Record a timing event in the device's queue; return None if the device has no timing events."""
        return None

    def on_wait(self, note: Callable[[bool], None]) -> None:
        """Register a callback for waits of the device queue for other ranks.

        Args:
            note: Function called with True when a wait starts, and with False when the wait ends.
        """

    def profiler_options(self, profiles: Path) -> tuple[dict[str, Any], str]:
        """Arguments with which torch's profiler also records this device, and a log message about the recording.

        Args:
            profiles: Folder of the run's profiles.
        """
        return {}, ""

    def finish_profiled(self) -> None:
        """Wait until the device completes the profiled steps; does nothing where torch's profiler itself waits."""

    def queued(self) -> Mapping[str, Queued]:
        """Newest collective of this rank per communicator; empty on devices that record no collectives."""
        return {}

    def recording(self) -> bytes:
        """Recording of the newest collectives in torch's flight recorder format; empty on devices without one."""
        return b""

    def watch_memory(self) -> None:
        """Start to record each allocation of device memory with its stack, for `dump_memory`."""

    def dump_memory(self, file: Path) -> bool:
        """Write a snapshot of the recorded allocations to a file; return False if the device cannot record them."""
        return False
