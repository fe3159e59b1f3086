"""Interface of a backend, independent of any device.

Models, optimizers and checkpoints use these types only; `backends/` is the only folder that imports a vendor's
libraries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_torch
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.backends.expert_choice import ExpertShape
from nxtrain.backends.rank_group import RankGroup
from nxtrain.common.distributed.collectives import Collectives, Pending
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.layers import RingAttention
from nxtrain.common.mesh import Axis, Mesh

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nxtrain.common.kernels import Kernels
    from nxtrain.common.layers import LayerSet


@dataclass(frozen=True)
class Support:
    """Result of the check if a backend can run on this machine, with the reason; its first line is a summary."""

    ok: bool
    reason: str


class Binding:
    """Interface to a vendor's library of parallel layers; this base class uses nxtrain's own layers.

    Attributes:
        name: Name of the layers, as in `backend.layers`.
    """

    name = "native"

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        """Ranks in the order of mesh places [pp, dp, tp] that suits the machine's interconnect; empty for ascending.

        Raises:
            BackendError: The library cannot place ranks for these degrees.
        """
        return ()

    def layers(self, native: LayerSet, mesh: Mesh, dtype: torch.dtype) -> LayerSet:
        """Return the layer set from which models are built.

        Args:
            native: nxtrain's own layers, used where the library lacks a layer or computes it wrong.
            mesh: Mesh with the axes of this rank.
            dtype: Type of the weights.

        Raises:
            BackendError: The library's process groups differ from the mesh.
        """
        return native

    def mark(self, model: nn.Module, tp: Axis) -> None:
        """Declare the sharding of the parameters to the library, after the parameters have their final storage."""

    def start_average(
        self, grads: Sequence[Tensor], dp: Axis, dtype: torch.dtype, comm: Collectives
    ) -> Pending[list[Tensor]]:
        """Start an all-reduce that averages gradients over all data parallel ranks, in the given type.

        The gradient tensors are not changed, and may be freed at once.
        """
        return comm.start_all_reduce_bucket(grads, dp, dtype, scale=1.0 / dp.size)

    def notes(self) -> tuple[str, ...]:
        """Log messages about the library of parallel layers."""
        return ()

    def close(self) -> None:
        """Destroy the process groups of the library of layers."""


def fetched_names(values: Mapping[str, Tensor]) -> list[str]:
    """Names of the scalars that `Backend.fetch` reads from tensors, in order; entry 2 of `load` is `load_2`."""
    names: list[str] = []
    for name, value in values.items():
        if value.dim() == 0:
            names.append(name)
        else:
            names += [f"{name}_{entry}" for entry in range(value.numel())]
    return names


@dataclass(frozen=True)
class BackendSettings:
    """Settings of a backend.

    Args:
        hang_timeout_s: Seconds that a collective waits for the other ranks; more where graphs may compile.
        torch_compile: The run uses `torch.compile`, which compiles on first use on every device.
        cpu_transport: Transport between the ranks of a CPU host: `auto`, `gloo` or `shared_memory`.
        allow_unverified: Allow releases of a vendor's library that nxtrain is not verified with.
        deterministic: GPU kernels give bitwise equal results in each run.
        rejoined: Number of rendezvous of this process after the loss of another rank.
    """

    hang_timeout_s: float = 1800.0
    torch_compile: bool = False
    cpu_transport: str = "auto"
    allow_unverified: bool = False
    deterministic: bool = False
    rejoined: int = 0


DEFAULTS = BackendSettings()
"""Settings of commands that do not train."""


class Backend(RankGroup):
    """Interface of a device backend: tensor storage, kernels, collectives and graph boundaries of one rank.

    Attributes:
        name: `cpu`, `cuda`, `xla` ...
        compiler: `torch.compile` backend for this device; None if the device's own compiler compiles whole steps.
        compiles_at_first_use: A graph or operation is compiled on first use, for up to an hour. The hang limits of
            watchdog, process groups and runtime allow for compilation.
        is_asynchronous: The host enqueues work, and continues while the device computes.
        device: Device of this rank's tensors.
        kernels: Kernels of the device.
        host_kernels: Kernels for tensors in host memory.
        extracts: Graphs are extracted for compilation and not run; fetched values are meaningless.
        binding: Binding to a vendor's library.
        diagnostics: Measurements of the device.
        float8: Description of the float8 matrix products; empty if the run has none.
        experts: Description of the expert kernels; empty if the device has no choice of them.
        has_rings: Some devices of this backend have a ring attention kernel.
        ring: Ring attention kernel; None if there is none, or if another method is chosen.
        attention: Chosen attention kernel; None if the device has only one, or before the choice.
        compiler_options: Options of `torch.compile` for `compiler`; None for the defaults.
    """

    compiler: str | None = None
    compiles_at_first_use: bool = False
    is_asynchronous: bool = False
    device: torch.device
    kernels: Kernels
    host_kernels: Kernels
    extracts: bool = False
    binding: Binding = Binding()
    diagnostics: Diagnostics = Diagnostics()
    float8: str = ""
    experts: str = ""
    has_rings: bool = False
    ring: RingAttention | None = None
    attention: AttentionChoice | None = None
    compiler_options: dict[str, Any] | None = None

    @abstractmethod
    def __init__(self, settings: BackendSettings = DEFAULTS) -> None:
        """Claim this rank's device and join the process group."""

    @staticmethod
    @abstractmethod
    def support() -> Support:
        """Check if this backend can run on this machine, and give the reason; the check claims no device."""

    def put(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the device."""
        return x.to(self.device)

    def pin(self, memory: Tensor) -> Callable[[], None] | None:
        """Pin host memory, so that copies from the device do not block the host.

        Returns:
            Function that unpins the memory, to call before the memory is freed. None if memory cannot be pinned.
        """
        return None

    @abstractmethod
    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Copy tensors to the host in one transfer, and return their entries as floats by name.

        This is the only device-to-host copy in training.

        Args:
            values: () tensors keep their names. Entries of other tensors are named NAME_0, NAME_1 and so on.
        """

    @abstractmethod
    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        """Copy numbers that change at each step to the device, as () float32 tensors.

        As tensors, they are inputs of graphs: a compiler does not fold them into constants.
        """

    def step_boundary(self) -> None:
        """Run the recorded graph on the device; on eager devices nothing is recorded, and the call does nothing."""

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        """Choose the attention kernel; called once, before a model is built.

        Args:
            wanted: `auto`, `plain` or `flash`.
            shape: Shape of one rank's attention.

        Raises:
            ConfigError: The wanted kernel cannot run.
        """
        self.attention = choose_torch(self.name, wanted, shape)

    def choose_experts(self, wanted: str, shape: ExpertShape | None) -> None:
        """Choose the kernels of the experts' matrix products; called once, before a model is built.

        Args:
            wanted: `auto`, `blockwise` or `plain`.
            shape: Shape of the experts; None if the model has none.

        Raises:
            ConfigError: The wanted kernels cannot run.
        """
        del shape
        if wanted == "blockwise":
            reason = f"is blockwise, but backend.name={self.name} has no blockwise kernel of experts"
            raise ConfigError([Problem("backend.experts", reason, hint="use auto")])

    def choose_rounding(self, update: str, wanted: str) -> None:
        """Choose the random number generator of stochastic rounding; called once, before a model is built.

        Args:
            update: `precision.update`.
            wanted: `auto`, `software` or `hardware`.

        Raises:
            BackendError: The wanted generator cannot run.
        """

    def choose_float8(self, recipe: str, params: str) -> None:
        """Choose the float8 matrix products; called once, before a model is built.

        Args:
            recipe: `precision.fp8`.
            params: `precision.params`.

        Raises:
            ConfigError: The device has no float8 matrix products.
        """
        if recipe != "none":
            reason = f"is {recipe}, but backend.name={self.name} has no float8 matrix products"
            raise ConfigError([Problem("precision.fp8", reason, hint="use none; cuda has them, and cpu emulates them")])

    def compile_kernels(self) -> None:
        """Compile the kernels outside of a model's blocks, such as the optimizer's; most devices gain nothing."""

    def overlap_products(self, tp: Axis) -> None:
        """Overlap the tensor parallel collectives of compiled blocks with their matrix products (async tp).

        Called before a model is built.

        Raises:
            ConfigError: The device cannot overlap them.
        """
        reason = f"needs GPUs that access each other's memory, but backend.name={self.name}"
        raise ConfigError([Problem("parallel.async_tp", reason, hint="use false")])

    def notes(self) -> tuple[str, ...]:
        """Log messages about the kernels that this backend chose for the run, each with the reason."""
        attention = "" if self.attention is None else str(self.attention)
        return tuple(filter(None, (attention, self.experts, self.float8)))

    def close(self) -> None:
        """Leave the process group and free the device."""
        self.binding.close()
