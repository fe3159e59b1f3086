"""What a backend must offer, and nothing about any one of them.

The model, the optimizer and the checkpoint are written against these types; `backends/` is the only folder that knows a
vendor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from nxtrain.distributed.collectives import Collectives, Pending
from nxtrain.errors import BackendError, ConfigError, Problem
from nxtrain.mesh import Axis, Mesh
from nxtrain.process.greetings import without_greetings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from nxtrain.backends.rounding import RoundingKey
    from nxtrain.config.schema import RunConfig
    from nxtrain.distributed.heartbeats import Board
    from nxtrain.family import ModelConfig, ModelFamily
    from nxtrain.sharding import Init, Segment, ShardSpec


@dataclass(frozen=True)
class Support:
    """An answer to "can this run here", with its reason; the first line is enough where there is a choice."""

    ok: bool
    reason: str


class Head(Protocol):
    """The output projection, with the loss that never builds its full output."""

    weight: nn.Parameter
    specs: dict[str, ShardSpec]

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the tokens' cross entropies: (S/tp, B, D), (S, B) to ()."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(S/tp, B, D) to (S, B, vocab_size) float32, whole on every rank; not differentiable."""
        ...


@dataclass(frozen=True)
class AdamStep:
    """What an AdamW update depends on, beside its tensors.

    Args:
        lr: () float32, on the device, so that a new value needs no new graph.
        step: () float32, on the device, updates done including this one.
        grad_scale: () float32, on the device, multiplies every gradient.
        betas, eps, weight_decay: As in Loshchilov and Hutter 2019 (arXiv:1711.05101), decay decoupled.
        skip: () bool, on the device, leaves every tensor as it is, bit for bit; None: never.
    """

    lr: Tensor
    step: Tensor
    grad_scale: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    skip: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter.

    Args:
        name: The parameter.
        start, number: Indices of dimension 0.
        whole: They are all that there are.
    """

    name: str
    start: int
    number: int
    whole: bool

    def of(self, x: Tensor) -> Tensor:
        """Their view into a tensor of the parameter's shape."""
        return x if self.whole else x.narrow(0, self.start, self.number)


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention computes, in each block.

    Args:
        micro_batch: Sequences at a time.
        seq_len: Tokens of each.
        num_heads: Query heads of this rank.
        head_size: Width of one.
        params: `fp32` or `bf16`, type of queries, keys and values.
    """

    micro_batch: int
    seq_len: int
    num_heads: int
    head_size: int
    params: str

    @staticmethod
    def of(config: RunConfig, family: ModelFamily, model: ModelConfig) -> AttentionShape:
        """That of a run."""
        num_heads, head_size = family.heads(model)
        train, params = config.train, config.precision.params
        return AttentionShape(train.micro_batch, train.seq_len, num_heads // config.parallel.tp, head_size, params)


class Kernels(ABC):
    """The operations that are worth a different implementation on each kind of device.

    Attributes:
        host_may_look: Reading a number in the midst of an update costs nothing.
        rounds: The device rounds every cast from float32 to bfloat16 at random, by a stream of its own. Ranks that
            compute the same then find values that differ, wherever their streams differ.
    """

    host_may_look: bool = False
    rounds: bool = False

    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of grouped queries, scaled by 1/sqrt(head_dim).

        Args:
            q: (S, B, num_heads, head_dim).
            k, v: (S, B, num_kv_heads, head_dim); each serves num_heads / num_kv_heads adjacent query heads.

        Returns:
            (S, B, num_heads, head_dim).
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, rounded once: (..., D), (D,) to (..., D)."""

    @abstractmethod
    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """`function(*inputs)`, of which only the inputs are kept for the backward pass, which calls it again.

        Args:
            function: Computes the same each time, and draws no random numbers.
            inputs: The tensors among them receive gradients, like the parameters that it uses.
        """

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        """How to divide an update over calls of `adamw`: all at once, unless the device prefers otherwise."""
        rows = [Rows(name, 0, shape[0], whole=True) for name, shape in shapes.items() if shape[0]]
        return [rows] if rows else []

    @abstractmethod
    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        """One AdamW update in place of contiguous float32 tensors of equal shapes; may overwrite `grads`.

        What becomes of an entry does not depend on where in a tensor it lies.
        """

    @abstractmethod
    def bits(self, x: Tensor) -> Tensor:
        """The bits of float32 as int32 of the same shape."""

    @abstractmethod
    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        """Give `x` new values, rounded to nearest, unless () bool `unless` is true."""

    @abstractmethod
    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        """Round to one of the two nearest bfloat16 values, the nearer the likelier, so that the mean is `x`.

        Values that bfloat16 has, infinities and NaN stay as they are; what rounds above the largest becomes infinite.
        The result depends on the arguments alone, and is the same on every device that rounds in software. A device
        may draw bits of its own instead, unless the key is shared.

        Args:
            x: float32; may be overwritten.
            out: As `x`, bfloat16 or float32; may be `x`.
            key: What the random bits depend on; a row of the key is an index of dimension 0.
            step: () int32, `step_hash` of the number of updates.
        """


class LayerSet(ABC):
    """The layers that are cut over tp, ready for one rank: one set on plain collectives, others on a vendor's layers.

    All sets give their parameters the same names, shapes and `ShardSpec`s.

    Attributes:
        tp: Tensor parallel axis.
        sequence_parallel: Between these layers, activations are cut along the sequence, (S / tp, B, D).
    """

    tp: Axis
    sequence_parallel: bool

    @abstractmethod
    def column(self, in_features: int, segments: tuple[Segment, ...], init: Init) -> nn.Module:
        """(S/tp, B, in) to (S, B, out/tp), the segments one after the other."""

    @abstractmethod
    def row(self, in_features: int, out_features: int, init: Init) -> nn.Module:
        """(S, B, in/tp) to (S/tp, B, out)."""

    @abstractmethod
    def embedding(self, vocab_size: int, hidden_size: int, init: Init) -> nn.Module:
        """(S, B) tokens to (S/tp, B, D)."""

    @abstractmethod
    def head(self, vocab_size: int, hidden_size: int, init: Init) -> Head:
        """Scores over the vocabulary and the loss on them."""


class Binding:
    """What a vendor's library does in place of our own code for one rank; this one, which has no library, nothing.

    Attributes:
        name: Of the layers, as in `backend.layers`.
    """

    name = "native"

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        """Every rank once, in the places [pp, dp, tp] that suit the wiring of the machine; empty for ascending.

        Raises:
            BackendError: The library cannot lay out these degrees.
        """
        return ()

    def layers(self, native: LayerSet, mesh: Mesh, dtype: torch.dtype) -> LayerSet:
        """The layers to build a model of.

        Args:
            native: Our own, for what the library lacks or has wrong.
            mesh: The axes of this rank.
            dtype: Type of the weights.

        Raises:
            BackendError: The library lays out the ranks in another way than the mesh.
        """
        return native

    def mark(self, model: nn.Module, tp: Axis) -> None:
        """Tell the library how the parameters are cut; called when they have their storage and are not replaced."""

    def start_average(
        self, grads: Sequence[Tensor], dp: Axis, dtype: torch.dtype, comm: Collectives
    ) -> Pending[list[Tensor]]:
        """Average gradients over all data parallel ranks in a type.

        The gradients keep their values, and may be freed at once.
        """
        return comm.start_all_reduce_bucket(grads, dp, dtype, scale=1.0 / dp.size)

    def notes(self) -> tuple[str, ...]:
        """Lines for people about the library that is used."""
        return ()

    def close(self) -> None:
        """Forget the ranks."""


class Backend(ABC):
    """One kind of device: where tensors live, how ranks talk, and when work is handed over.

    Attributes:
        name: `cpu`, `cuda`, `xla` ...
        compiler: `torch.compile`'s backend for this device; None: a compiler of its own gets whole steps anyway.
        device: Where this rank's tensors live.
        world, rank: Number of processes, and this one among them.
        local_world, local_rank: The same among those of its node.
        collectives: How this rank talks to others.
        kernels: What it computes differently from others.
        host_kernels: The same for what is kept in host memory.
        extracts: It computes nothing, since graphs are being collected to be compiled; what is fetched has no meaning.
        host_group: Group of all ranks that carries host objects; None: torch's default group does.
        binding: What a vendor's library does in place of our own code.
        allow_unverified: Releases of a vendor's library that nxtrain is not verified with can be used too.
    """

    name: str
    compiler: str | None = None
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

    @abstractmethod
    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        """Claim this rank's device and join its process group, whose collectives fail after so long without a peer."""

    @staticmethod
    @abstractmethod
    def support() -> Support:
        """Whether this backend can run here, and why or why not; claims no device."""

    @abstractmethod
    def put(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the device."""

    @abstractmethod
    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Read scalars: the only device-to-host read in training, one transfer for all of them."""

    @abstractmethod
    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        """Upload numbers that change from step to step, as () float32 tensors that never become constants."""

    def lay_out(self, mesh: Mesh) -> None:
        """Learn which ranks work together; all ranks call it once, before they talk.

        Ranks of several pipeline stages use their axes in different orders, and must not meet for the first time when
        they do.
        """

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        """The data parallel ranks as torch's own sharding takes them: (shard,) or (replica, shard).

        Raises:
            BackendError: The device has no process groups.
        """
        raise BackendError(
            "parallel.shard=grad_op, full and hybrid run on the backends cpu, cuda and neuron-native, not on "
            f"{self.name}; use parallel.shard=zero1, which cuts the optimizer state on every backend"
        )

    def step_boundary(self) -> None:
        """Hand what was recorded of a step to the device; eager devices have nothing to do."""

    def num_compiled(self) -> int:
        """Graphs that this process has compiled so far; 0 where nothing is compiled. Costs nothing to ask."""
        return 0

    def compare_graphs(self, work: str) -> None:
        """Let ranks of a stage compare the graphs that follow before they run them; each takes tens of milliseconds.

        Where each operation is its own, as on eager devices, there is nothing to compare.

        Args:
            work: What the graphs are for, in words; the same on all ranks. Empty: no more comparisons.
        """

    def background_group(self, hang_timeout_s: float) -> ProcessGroup | None:
        """A new group of all ranks that carries host objects while training talks; None: there are no others."""
        import torch.distributed as dist

        if self.world == 1 or not dist.is_initialized():
            return None
        with without_greetings():
            group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=hang_timeout_s))
        return group

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        """Settle how attention is computed; called once, before a model is built.

        Args:
            wanted: `auto`, `plain` or `flash`.
            shape: What is to be computed.

        Raises:
            ConfigError: It cannot be computed as wanted.
        """
        if wanted == "flash":
            reason = f"flash is NKI's kernel for backend.name=neuron; {self.name} has torch's attention only"
            raise ConfigError([Problem("backend.attention", reason, hint="use auto")])

    def notes(self) -> tuple[str, ...]:
        """What this backend has settled for the run, each with its reason, in words."""
        return ()

    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations per second that the maker states for one device; None if unknown."""
        return None

    def peak_memory_bytes(self) -> int:
        """Most device memory that this rank has held at once; 0 if the device does not tell."""
        return 0

    def board(self) -> Board | None:
        """Where ranks tell each other what they do, apart from any collective; None if they have no such place."""
        return None

    def waited_s(self) -> float:
        """Seconds that this rank's host has waited for other ranks so far; 0 where it does not know."""
        return 0.0

    def failed(self, error: Exception) -> Exception:
        """Let the other ranks know why this one ends early, or learn from them if it only lost one of them.

        Takes a few seconds at most. From now on `close` waits for nobody, and the process must end.

        Args:
            error: What ended the run here.

        Returns:
            What to tell: the error, or what a rank that failed before says of itself.
        """
        return error

    def close(self) -> None:
        """Leave the process group and free the device."""
        self.binding.close()
