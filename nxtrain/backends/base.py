"""Interface of a backend, independent of any device.

Models, optimizers and checkpoints use these types only; `backends/` is the only folder that imports a vendor's
libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_torch
from nxtrain.common.distributed.collectives import Collectives, Pending
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.process.greetings import without_greetings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from nxtrain.common.distributed.heartbeats import HeartbeatStore
    from nxtrain.common.kernels import Kernels
    from nxtrain.common.layers import LayerSet


@dataclass(frozen=True)
class Support:
    """Result of the check if a backend can run on this machine, with a reason, whose first line is a summary."""

    ok: bool
    reason: str


class DeviceEvent(Protocol):
    """Event in the queue of a device, as torch has it."""

    def query(self) -> bool:
        """True if the device has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""
        ...

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        """Milliseconds from this event to a later one, both reached."""
        ...


class Binding:
    """Work that a vendor's library does for one rank; this base class uses nxtrain's own code only.

    Attributes:
        name: Name of the layers, as in `backend.layers`.
    """

    name = "native"

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        """Every rank once, in an order of places [pp, dp, tp] that suits the machine's wiring; empty for ascending.

        Raises:
            BackendError: The library cannot lay out these degrees.
        """
        return ()

    def layers(self, native: LayerSet, mesh: Mesh, dtype: torch.dtype) -> LayerSet:
        """Layers for building a model.

        Args:
            native: nxtrain's own layers, for those that the library lacks or computes wrong.
            mesh: The axes of this rank.
            dtype: Type of the weights.

        Raises:
            BackendError: The library lays out the ranks in another way than the mesh.
        """
        return native

    def mark(self, model: nn.Module, tp: Axis) -> None:
        """Pass the sharding of the parameters to the library; called after parameters have their final storage."""

    def start_average(
        self, grads: Sequence[Tensor], dp: Axis, dtype: torch.dtype, comm: Collectives
    ) -> Pending[list[Tensor]]:
        """Start to average gradients over all data parallel ranks, in the given type.

        The gradients keep their values, and may be freed at once.
        """
        return comm.start_all_reduce_bucket(grads, dp, dtype, scale=1.0 / dp.size)

    def notes(self) -> tuple[str, ...]:
        """Lines for people about the library that is used."""
        return ()

    def close(self) -> None:
        """Drop the library's process groups."""


def fetched_names(values: Mapping[str, Tensor]) -> list[str]:
    """Names of the numbers that `Backend.fetch` reads from some tensors, in order."""
    return [
        name if value.dim() == 0 else f"{name}_{entry}"
        for name, value in values.items()
        for entry in range(value.numel())
    ]


class Backend(ABC):
    """One kind of device: storage of tensors, communication between ranks, and boundaries of graphs.

    Attributes:
        name: `cpu`, `cuda`, `xla` ...
        compiler: `torch.compile`'s backend for this device; None: the device's own compiler gets whole steps.
        compiles_at_first_use: A graph or operation is compiled when it is first used, for up to an hour. While work is
            new, the hang limits of watchdog, process groups and runtime allow for that.
        is_asynchronous: The host queues work, and goes on while the device computes.
        device: Device of this rank's tensors.
        world, rank: Number of processes, and the rank of this one.
        local_world, local_rank: The same numbers among the processes of this node.
        collectives: Communication with other ranks.
        kernels: Kernels of the device.
        host_kernels: Kernels for tensors in host memory.
        extracts: Graphs are collected for compilation and not run; fetched values are meaningless.
        host_group: Group of all ranks that carries host objects; None: torch's default group.
        binding: Binding to a vendor's library.
        allow_unverified: Allow releases of a vendor's library that nxtrain is not verified with.
        attention: Chosen implementation of attention; None: the device has one only, or none is chosen yet.
    """

    name: str
    compiler: str | None = None
    compiles_at_first_use: bool = False
    is_asynchronous: bool = False
    device: torch.device
    world: int
    rank: int
    local_world: int
    local_rank: int
    collectives: Collectives
    kernels: Kernels
    host_kernels: Kernels
    extracts: bool = False
    host_group: ProcessGroup | None = None
    binding: Binding = Binding()
    allow_unverified: bool = False
    attention: AttentionChoice | None = None

    @abstractmethod
    def __init__(self, *, hang_timeout_s: float = 1800.0, torch_compile: bool = False) -> None:
        """Claim this rank's device and join the process group.

        Args:
            hang_timeout_s: Seconds that a collective waits for the other ranks; more where graphs may compile.
            torch_compile: The run uses `torch.compile`, which compiles at first use on every device.
        """

    @staticmethod
    @abstractmethod
    def support() -> Support:
        """Check if this backend can run on this machine, with the reason; claims no device."""

    @abstractmethod
    def put(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the device."""

    @abstractmethod
    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Read numbers: the only device-to-host read in training, one transfer for all of them.

        Args:
            values: () tensors, and tensors whose entries get names of their own: NAME_0, NAME_1 and so on.
        """

    @abstractmethod
    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        """Upload numbers that change from step to step, as () float32 tensors that no compiler folds into constants."""

    def lay_out(self, mesh: Mesh) -> None:
        """Set the mesh of the run; all ranks call this once, before any communication.

        Ranks of different pipeline stages use their axes in different orders, so their groups must be made here, not
        at the first use.
        """

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        """Device mesh of the data parallel ranks for torch's own sharding: (shard,) or (replica, shard).

        Raises:
            BackendError: The device has no process groups.
        """
        raise BackendError(
            "parallel.shard=grad_op, full and hybrid run on the backends cpu, cuda and neuron-native, not on "
            f"{self.name}; use parallel.shard=zero1, which cuts the optimizer state on every backend"
        )

    def step_boundary(self) -> None:
        """Run the recorded graph on the device; does nothing on eager devices."""

    def fallbacks(self) -> tuple[str, ...]:
        """Operations that ran on the host since `forget_fallbacks`, because the device lacks them."""
        return ()

    def forget_fallbacks(self) -> None:
        """Start the list of `fallbacks` anew."""

    def num_compiled(self) -> int:
        """Number of graphs that this process has compiled so far; 0 on eager devices. The call costs nothing."""
        return 0

    def compare_graphs(self, work: str) -> None:
        """Compare later graphs between the ranks of a stage before each runs; a comparison takes tens of milliseconds.

        Eager devices have no graphs to compare.

        Args:
            work: Name of the work that the graphs do; the same on all ranks. Empty: end the comparisons.
        """

    def background_group(self, hang_timeout_s: float) -> ProcessGroup | None:
        """Make a group of all ranks for host objects, usable next to training's collectives; None with one rank."""
        import torch.distributed as dist

        if self.world == 1 or not dist.is_initialized():
            return None
        with without_greetings():
            group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=hang_timeout_s))
        return group

    def choose_transport(self, wanted: str) -> None:
        """Choose the transport between ranks on CPUs; all ranks call this, before a model is built.

        Args:
            wanted: `auto`, `gloo` or `shared_memory`.

        Raises:
            BackendError: The wanted transport cannot run.
        """

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        """Choose the implementation of attention; called once, before a model is built.

        Args:
            wanted: `auto`, `plain` or `flash`.
            shape: Shape of the attention.

        Raises:
            ConfigError: The wanted implementation cannot run.
        """
        self.attention = choose_torch(self.name, wanted, shape)

    def choose_rounding(self, update: str, wanted: str) -> None:
        """Choose the random bits of stochastic rounding; called once, before a model is built.

        Args:
            update: `precision.update`.
            wanted: `auto`, `software` or `hardware`.

        Raises:
            BackendError: The wanted bits cannot be had.
        """

    def compile_kernels(self) -> None:
        """Let kernels make graphs of the work around a model's blocks; most devices gain nothing by that."""

    def notes(self) -> tuple[str, ...]:
        """Lines for people about this backend's choices for the run, each with its reason."""
        return (str(self.attention),) if self.attention else ()

    def bf16_warning(self) -> str:
        """Warning for a run whose products are in bf16, on a device without them; empty if the device has them."""
        return ""

    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations per second of one device, by its maker's figures; None if unknown."""
        return None

    def peak_memory_bytes(self) -> int:
        """Peak device memory of this rank in bytes; 0 if unknown."""
        return 0

    def profiler_options(self, profiles: Path) -> tuple[dict[str, Any], str]:
        """Arguments of torch's profiler that record this device too, and a line for people about the device's part.

        Args:
            profiles: Folder of the run's profiles.
        """
        return {}, ""

    def finish_profiled(self) -> None:
        """Wait until the device has done the work that is profiled; does nothing where torch's profiler waits."""

    def watch_memory(self) -> None:
        """Record each allocation of the device with its stack from now on, for `dump_memory`."""

    def dump_memory(self, file: Path) -> bool:
        """Write a snapshot of the device's memory; False: the device has none."""
        return False

    def heartbeat_store(self) -> HeartbeatStore | None:
        """Heartbeat store of the ranks, independent of collectives; None if the run has none."""
        return None

    def waited_s(self) -> float:
        """Seconds that this rank's host has waited for other ranks so far; 0 if unknown."""
        return 0.0

    def event(self) -> DeviceEvent | None:
        """Put an event with a time into the device's queue; None: the device has no such events."""
        return None

    def on_wait(self, note: Callable[[bool], None]) -> None:
        """Call a function with True when the queue begins to wait for other ranks, and with False when it goes on."""

    def failed(self, error: Exception) -> Exception:
        """Publish why this rank fails; if it only lost a peer, return the peer's own failure.

        The call takes a few seconds at most. Afterwards `close` does not wait for other ranks, and the process must
        end.

        Args:
            error: Exception that ended the run on this rank.

        Returns:
            The error to report: `error`, or the first failure of another rank.
        """
        return error

    def close(self) -> None:
        """Leave the process group and free the device."""
        self.binding.close()
