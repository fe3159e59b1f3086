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
    """Result of the check if a backend can run on this machine, with a reason, whose first line is a summary."""

    ok: bool
    reason: str


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
        """Messages about the library of layers."""
        return ()

    def close(self) -> None:
        """Destroy the process groups of the library of layers."""


def fetched_names(values: Mapping[str, Tensor]) -> list[str]:
    """Names of the numbers that `Backend.fetch` reads from some tensors, in order."""
    names: list[str] = []
    for name, value in values.items():
        if value.dim() == 0:
            names.append(name)
        else:
            names += [f"{name}_{entry}" for entry in range(value.numel())]
    return names


@dataclass(frozen=True)
class BackendSettings:
    """Settings with which a backend is opened.

    Args:
        hang_timeout_s: Seconds that a collective waits for the other ranks; more where graphs may compile.
        torch_compile: The run uses `torch.compile`, which compiles at first use on every device.
        cpu_transport: Transport between the ranks of a CPU host: `auto`, `gloo` or `shared_memory`.
        allow_unverified: Allow releases of a vendor's library that nxtrain is not verified with.
        deterministic: Kernels of a GPU repeat their bits.
        rejoined: Times that this process has met the other ranks again after the loss of one.
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
    """One kind of device in a group of ranks: storage of tensors, kernels, and boundaries of graphs.

    Attributes:
        name: `cpu`, `cuda`, `xla` ...
        compiler: `torch.compile`'s backend for this device; None: the device's own compiler gets whole steps.
        compiles_at_first_use: A graph or operation is compiled when it is first used, for up to an hour. While work is
            new, the hang limits of watchdog, process groups and runtime allow for that.
        is_asynchronous: The host queues work, and goes on while the device computes.
        device: Device of this rank's tensors.
        kernels: Kernels of the device.
        host_kernels: Kernels for tensors in host memory.
        extracts: Graphs are collected for compilation and not run; fetched values are meaningless.
        binding: Binding to a vendor's library.
        diagnostics: Measurements of the device.
        float8: Products in float8, in words; empty: there are none.
        experts: Products of experts, in words; empty: there is no choice.
        has_rings: Some machines of this kind have a kernel for `ring`.
        ring: Kernel of attention between context parallel ranks; None: there is none, or it is not chosen.
        attention: Chosen implementation of attention; None: the device has one only, or none is chosen yet.
        compiler_options: Options of `torch.compile` for `compiler`; None: its defaults.
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
        """Check if this backend can run on this machine, with the reason; claims no device."""

    @abstractmethod
    def put(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the device."""

    def pin(self, memory: Tensor) -> Callable[[], None] | None:
        """Let the device write to host memory while the host goes on.

        Returns:
            A function that ends it, before the memory is freed; None: copies to the memory make the host wait.
        """
        return None

    @abstractmethod
    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Read numbers: the only device-to-host read in training, one transfer for all of them.

        Args:
            values: () tensors, and tensors whose entries get names of their own: NAME_0, NAME_1 and so on.
        """

    @abstractmethod
    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        """Upload numbers that change from step to step, as () float32 tensors that no compiler folds into constants."""

    def step_boundary(self) -> None:
        """Run the recorded graph on the device; does nothing on eager devices."""

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        """Choose the implementation of attention; called once, before a model is built.

        Args:
            wanted: `auto`, `plain` or `flash`.
            shape: Shape of the attention.

        Raises:
            ConfigError: The wanted implementation cannot run.
        """
        self.attention = choose_torch(self.name, wanted, shape)

    def choose_experts(self, wanted: str, shape: ExpertShape | None) -> None:
        """Choose the products of experts; called once, before a model is built.

        Args:
            wanted: `auto`, `blockwise` or `plain`.
            shape: Shape of the experts; None: the model has none.

        Raises:
            ConfigError: The wanted products cannot be had.
        """
        del shape
        if wanted == "blockwise":
            reason = f"blockwise, but backend.name={self.name} has no kernel of all experts"
            raise ConfigError([Problem("backend.experts", reason, hint="use auto")])

    def choose_rounding(self, update: str, wanted: str) -> None:
        """Choose the random bits of stochastic rounding; called once, before a model is built.

        Args:
            update: `precision.update`.
            wanted: `auto`, `software` or `hardware`.

        Raises:
            BackendError: The wanted bits cannot be had.
        """

    def choose_float8(self, recipe: str, params: str) -> None:
        """Choose the products in float8; called once, before a model is built.

        Args:
            recipe: `precision.fp8`.
            params: `precision.params`.

        Raises:
            ConfigError: The device has no such products.
        """
        if recipe != "none":
            reason = f"{recipe}, but backend.name={self.name} has no products in float8"
            raise ConfigError([Problem("precision.fp8", reason, hint="use none; cuda has them, and cpu emulates them")])

    def compile_kernels(self) -> None:
        """Let kernels make graphs of the work around a model's blocks; most devices gain nothing by that."""

    def overlap_products(self, tp: Axis) -> None:
        """Let compiled blocks gather and scatter over tp while they multiply; called before a model is built.

        Raises:
            ConfigError: The device has no such products.
        """
        reason = f"is for GPUs, whose memory their peers can reach, not for backend.name={self.name}"
        raise ConfigError([Problem("parallel.async_tp", reason, hint="use false")])

    def notes(self) -> tuple[str, ...]:
        """Messages about the choices of this backend for the run, each with the reason."""
        attention = "" if self.attention is None else str(self.attention)
        return tuple(filter(None, (attention, self.experts, self.float8)))

    def close(self) -> None:
        """Leave the process group and free the device."""
        self.binding.close()
