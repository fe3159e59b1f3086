"""Choice of the attention kernel for a device and an attention shape, among torch's implementations.

Importable without torch. `backends/neuron/` chooses between the kernels of Trainium.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from nxtrain.backends.limits import (
    FLASH_HEAD_MULTIPLE,
    LONGEST_SCORES,
    MAX_FLASH_HEAD,
    MIN_FLEX_HEAD,
    XLA_LOOPS,
    block_rows,
)
from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.sequence_cut import ContextMethod, CutLayout, SequenceCut
from nxtrain.config.schema import ATTENTION, ON_GPUS, ON_XLA

if TYPE_CHECKING:
    from nxtrain.config.schema import RunConfig

GpuKernel = Literal["sdpa", "cudnn", "flash", "flash3", "flash4", "efficient", "fused"]
AttentionKind = Literal[GpuKernel, "bounded", "ring", "flex", "plain", "blocked", "per-document"]
"""Kind of attention kernel.

Fused kernels keep no scores in memory: `flash` (FlashAttention 2 or NKI's kernel), `flash3`, `flash4`, `cudnn`,
`efficient` (torch's memory-efficient kernel), `fused` (the first of them that the GPU has), `sdpa` (torch's choice).
`bounded` is NKI's kernel with key bounds per query, `ring` NKI's ring attention, `flex` FlexAttention. Elementary
operations compute all scores (`plain`), or the scores of one block of queries at a time (`blocked`). `per-document`
calls torch's kernel once per document.
"""

CUDA_KERNELS: dict[str, str] = {
    "sdpa": "as torch's release chooses between its kernels",
    "cudnn": "cuDNN's kernel",
    "flash": "FlashAttention 2 of torch",
    "flash3": "FlashAttention 3, from the package flash-attn-3",
    "flash4": "FlashAttention 4, from the package flash-attn-4",
    "efficient": "torch's memory-efficient kernel",
    "fused": "the first of cuDNN's, FlashAttention's and torch's kernels whose trial on the device is right",
}
"""Descriptions of the kernels of torch's causal attention on GPUs, for log lines."""

DOCUMENTS = "data.doc_mask=true keeps documents apart"
"""Start of the message that attention is restricted to each document."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's attention in each block.

    Args:
        micro_batch: Sequences in a micro-batch.
        seq_len: Tokens per sequence, over all context parallel ranks.
        num_heads: Query heads of this rank.
        head_size: Width of a head.
        params: `fp32` or `bf16`, the type of queries, keys and values.
        documents: A query attends to the keys of its own document only.
        compiled: `torch.compile` compiles the transformer blocks.
        cp: Context parallel ranks.
        cp_method: `parallel.cp_method`.
        cp_layout: `parallel.cp_layout`.
        window: Most keys that a query attends to, including its own; None for no limit.
        full_layers: Number of layers without a window, whose queries attend to all keys before them.
        sinks: Each query head has an attention sink, a score without a key.
    """

    micro_batch: int
    seq_len: int
    num_heads: int
    head_size: int
    params: str
    documents: bool = False
    compiled: bool = False
    cp: int = 1
    cp_method: Literal["auto"] | ContextMethod = "auto"
    cp_layout: Literal["auto"] | CutLayout = "auto"
    window: int | None = None
    full_layers: int = 0
    sinks: bool = False

    @staticmethod
    def of(config: RunConfig, dimensions: Dimensions) -> AttentionShape:
        """Return the attention shape of a run."""
        return AttentionShape(
            micro_batch=config.train.micro_batch,
            seq_len=config.train.seq_len,
            num_heads=dimensions.num_heads // config.parallel.tp,
            head_size=dimensions.head_size,
            params=config.precision.params,
            documents=config.data.doc_mask,
            compiled=bool(config.compile.torch_compile),
            cp=config.parallel.cp,
            cp_method=config.parallel.cp_method,
            cp_layout=config.parallel.cp_layout,
            window=dimensions.window,
            full_layers=dimensions.num_full_layers,
            sinks=dimensions.sinks,
        )

    @property
    def has_window(self) -> bool:
        """True if the sliding window is shorter than the sequence."""
        return self.window is not None and self.window < self.seq_len

    @property
    def is_mixed(self) -> bool:
        """True if some layers have a sliding window, and others full attention."""
        return self.has_window and self.full_layers > 0

    @property
    def limits(self) -> list[str]:
        """Reasons why plain causal attention over this rank's sequences is not enough."""
        reasons = []
        if self.cp > 1:
            reasons.append(f"parallel.cp={self.cp} shares the positions of a sequence")
        if self.documents:
            reasons.append(DOCUMENTS)
        if self.has_window:
            reasons.append(f"a query sees {self.window:,} keys")
        return reasons

    @property
    def is_long(self) -> bool:
        """True if the sequence is too long for elementary operations to hold all scores at once."""
        return self.seq_len > LONGEST_SCORES

    @property
    def scores_cost(self) -> str:
        """Sentence with the MiB of attention scores of one transformer block, when all are computed at once."""
        size = 2 if self.params == "bf16" else 4
        mib = self.micro_batch * self.num_heads * self.seq_len**2 * size / 2**20
        return f"Each block's scores take {mib:,.0f} MiB (micro_batch x heads per rank x seq_len^2 x {size} bytes)"

    def blocks_cost(self, backend: str) -> str:
        """Sentences with the number of query blocks, their keys, and the MiB of scores of attention by blocks.

        Args:
            backend: `cpu`, `cuda`, `xla` ...
        """
        queries = self.seq_len // self.cp
        passes = self.cp > 1 and context_method(self.cp_method, backend) == "ring"
        keys = self.seq_len
        if passes:
            keys = queries
        heads = self.micro_batch * self.num_heads
        rows = min(block_rows(heads, keys), queries)
        if backend == "cpu" and not self.compiled:
            met = "the keys that its queries see"
        elif passes:
            met = "the keys up to its own of one rank after the other"
        elif self.cp > 1 and (self.compiled or backend in ON_XLA):
            met = f"all {keys:,} keys of a row"
        elif self.has_window:
            met = "the keys of its window"
        elif backend in ON_XLA:
            met = "all keys of the row up to those of its loop"
        else:
            met = "all keys of the row up to its own"
        in_loops = ""
        if backend in ON_XLA and queries > XLA_LOOPS * rows:
            in_loops = f". They are rounds of at most {XLA_LOOPS} loops, and the graph does not grow with the sequence"
        mib = heads * rows * keys * 4 / 2**20
        return (
            f"Each of {-(-queries // rows):,} blocks of {rows:,} queries meets {met}. The scores of a block take at "
            f"most {mib:,.3g} MiB (micro_batch x heads per rank x queries x keys x 4 bytes), and memory is linear in "
            f"the sequence{in_loops}"
        )


@dataclass(frozen=True)
class AttentionChoice:
    """Attention kernel of a run, with the reason for the choice.

    Args:
        kind: Kind of the kernel.
        reason: Reason for the choice.
        lnc: Physical NeuronCores that share a flash kernel on Trainium.
        has_full_flash: The layers without a window use a flash kernel, and the layers with a window use `kind`.
    """

    kind: AttentionKind
    reason: str
    lnc: int = 1
    has_full_flash: bool = False

    @property
    def is_flash(self) -> bool:
        """True if some layer uses a flash kernel."""
        return self.kind == "flash" or self.has_full_flash

    def __str__(self) -> str:
        """Log message with the kind of attention and the reason."""
        return f"{self.kind} attention: {self.reason}"


Choose = Callable[[AttentionShape], AttentionChoice | None]
"""Function that chooses the attention kernel of a model whose layers all have the same window."""


def choose_mixed(choose: Choose, shape: AttentionShape) -> AttentionChoice | None:
    """Choose the attention kernel of a model in which some layers have a sliding window and others none.

    The result is the kernel of the layers with a window. Its reason has a sentence about the other layers.

    Args:
        choose: Choice for layers of one kind.
        shape: Attention shape of the model.
    """
    with_window, full = choose(replace(shape, full_layers=0)), choose(replace(shape, full_layers=0, window=None))
    assert with_window is not None, "attention in windows has no choice without a name"
    kind = "torch's causal" if full is None else full.kind
    reason = f"{with_window.reason}. The first {shape.full_layers:,} layers have no window: {kind} attention"
    if full is None:
        return replace(with_window, reason=reason)
    if full.kind != with_window.kind:
        reason = f"{reason}, {full.reason}"
    return replace(with_window, reason=reason, lnc=full.lnc, has_full_flash=full.is_flash)


def choose_torch(backend: str, wanted: str, shape: AttentionShape) -> AttentionChoice | None:
    """Choose between torch's attention kernels; return None if torch's causal attention is enough.

    Args:
        backend: `cpu`, `cuda`, `xla` ...
        wanted: `backend.attention`.
        shape: Shape of one rank's attention.

    Raises:
        ConfigError: The backend does not have the wanted kernel, or the kernel cannot compute this attention.
    """
    if shape.sinks:
        return choose_sinks(backend, wanted, shape)
    if shape.is_mixed:
        return choose_mixed(partial(choose_torch, backend, wanted), shape)
    if wanted not in ATTENTION[backend]:
        reason = f"{wanted} is not a kernel of {backend}, which has torch's attention only"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto")])
    if backend == ON_GPUS:
        return _choose_cuda(wanted, shape)
    limits = "; ".join(shape.limits)
    if not limits:
        if backend != "xla" or not shape.is_long:
            return None
        reason = f"more than {LONGEST_SCORES:,} tokens per sequence, whose scores are not kept at once"
        return AttentionChoice("blocked", f"{reason}. {shape.blocks_cost(backend)}")
    apart = shape.cp == 1 and not shape.has_window
    if backend == "cpu" and apart and not shape.compiled:
        return AttentionChoice("per-document", f"{limits} by a call for each; no score between documents is computed")
    return _blocked(backend, wanted, shape, limits)


def choose_sinks(backend: str, wanted: str, shape: AttentionShape) -> AttentionChoice:
    """Choose the kernel of attention with sinks, which is computed block by block on every device.

    Raises:
        ConfigError: `wanted` is a fused kernel, and no fused kernel supports sinks.
    """
    if wanted not in ("auto", "plain", "blocked"):
        reason = f"{wanted} does not support attention sinks, which the heads of this model have"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto")])
    return AttentionChoice("blocked", f"heads have sinks. {shape.blocks_cost(backend)}")


def _choose_cuda(wanted: str, shape: AttentionShape) -> AttentionChoice:
    """Choose the attention kernel on GPUs for layers of one kind; the run tries the kernel when it starts.

    Raises:
        ConfigError: The wanted kernel cannot compute this attention.
    """
    limits, of_flash = "; ".join(shape.limits), _flash_obstacles(shape)
    obstacles = _obstacles(wanted, shape)
    if wanted == "flex":
        obstacles = _flex_obstacles(shape)
    if obstacles:
        reason = f"{wanted} cannot be had: {'; '.join(obstacles)}"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto, or remove this obstacle")])
    if wanted == "flex":
        return AttentionChoice("flex", f"{limits or 'backend.attention=flex'} {_BY_FLEX}")
    if limits and wanted == "plain":
        return _blocked(ON_GPUS, wanted, shape, limits)
    if limits and of_flash:
        return without_flash(shape, "; ".join(of_flash))
    if limits:
        calls = "a call takes a run of queries with a run of keys, and needs no mask"
        if shape.cp > 1:
            calls += "; outputs of several runs are joined by the sums of their weights"
        return AttentionChoice("flash", f"{limits}: {CUDA_KERNELS['flash']}, tried when a run starts; {calls}")
    if wanted == "plain" and shape.is_long:
        return AttentionChoice("blocked", f"as backend.attention=plain asks; {shape.blocks_cost(ON_GPUS)}")
    if wanted == "plain":
        return AttentionChoice("plain", f"as backend.attention=plain asks; {shape.scores_cost}")
    kernel = cast(GpuKernel, wanted)
    if wanted == "auto" and shape.params == "fp32":
        return AttentionChoice("efficient", f"{CUDA_KERNELS['efficient']}, the only one for precision.params=fp32")
    if wanted == "auto":
        kernel = "fused"
    return AttentionChoice(kernel, CUDA_KERNELS[kernel])


def without_flash(shape: AttentionShape, why: str) -> AttentionChoice:
    """Choose the kernel of attention with a mask on GPUs where FlashAttention cannot run.

    Args:
        why: Reason why FlashAttention cannot be used.
    """
    limits = "; ".join([*shape.limits, why])
    obstacles = _flex_obstacles(shape)
    if obstacles:
        return AttentionChoice("blocked", f"{limits}; {'; '.join(obstacles)}. {shape.blocks_cost(ON_GPUS)}")
    return AttentionChoice("flex", f"{limits}: {_BY_FLEX}")


_BY_FLEX = "by torch's FlexAttention, tried when a run starts; blocks without a visible key are left out"


def _flash_obstacles(shape: AttentionShape) -> list[str]:
    """Reasons why FlashAttention cannot compute attention with documents, a window or context parallelism."""
    obstacles = []
    if shape.params == "fp32":
        obstacles.append("precision.params=fp32, and FlashAttention takes bf16 and fp16")
    if shape.head_size % FLASH_HEAD_MULTIPLE or shape.head_size > MAX_FLASH_HEAD:
        takes = f"multiples of {FLASH_HEAD_MULTIPLE} up to {MAX_FLASH_HEAD}"
        obstacles.append(f"heads are {shape.head_size} wide, and FlashAttention takes {takes}")
    if shape.compiled:
        obstacles.append("compile.torch_compile=true, and a graph has no offsets of runs")
    is_gathered = shape.cp > 1 and context_method(shape.cp_method, ON_GPUS) == "gather"
    if is_gathered and SequenceCut.of(shape.seq_len, shape.cp, shape.cp_layout).layout == "striped":
        obstacles.append("parallel.cp_method=gather of parallel.cp_layout=striped has no runs of queries")
    return obstacles


def _flex_obstacles(shape: AttentionShape) -> list[str]:
    """Reasons why FlexAttention cannot be used."""
    obstacles = []
    if shape.cp > 1:
        obstacles.append(f"parallel.cp={shape.cp} shares the positions of a sequence, and flex takes whole rows")
    if shape.head_size < MIN_FLEX_HEAD:
        obstacles.append(f"heads are {shape.head_size} wide, and FlexAttention takes {MIN_FLEX_HEAD} at least")
    return obstacles


def _obstacles(wanted: str, shape: AttentionShape) -> list[str]:
    """Reasons why a configured kernel of `CUDA_KERNELS` cannot be used; empty for other values."""
    if wanted not in CUDA_KERNELS:
        return []
    if wanted == "flash" and shape.limits:
        return [f"{'; '.join(shape.limits)}; {obstacle}" for obstacle in _flash_obstacles(shape)]
    obstacles = []
    if shape.limits:
        obstacles.append(f"{'; '.join(shape.limits)}, and {wanted} takes no mask")
    if shape.params == "fp32" and wanted != "sdpa":
        obstacles.append("precision.params=fp32, and the kernel takes bf16 and fp16")
    return obstacles


def _blocked(backend: str, wanted: str, shape: AttentionShape, limits: str) -> AttentionChoice:
    """Return the choice of attention by blocks of queries, with the reason why a mask is needed."""
    because = "torch's flash kernels take no mask"
    if wanted == "plain":
        because = "backend.attention=plain asks for elementary operations"
    return AttentionChoice("blocked", f"{limits}, and {because}. {shape.blocks_cost(backend)}")


def choose_by(
    backend: str, wanted: str, shape: AttentionShape, obstacles: list[str], flash: AttentionChoice, kernel: str
) -> AttentionChoice:
    """Choose a flash kernel of Trainium, or elementary operations if there are obstacles.

    Args:
        backend: `neuron` or `neuron-native`.
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        obstacles: Reasons why the kernel cannot be used, other than masks.
        flash: Choice to return for the flash kernel.
        kernel: Name of the kernel, for messages.

    Raises:
        ConfigError: `wanted` is `flash`, and the kernel cannot run in every layer.
    """
    if shape.sinks:
        return choose_sinks(backend, wanted, shape)
    if shape.is_mixed:
        own = partial(choose_by, backend, wanted, obstacles=obstacles, flash=flash, kernel=kernel)
        return cast(AttentionChoice, choose_mixed(own, shape))
    if shape.limits:
        obstacles = [f"{'; '.join(shape.limits)}, and {kernel} takes no mask", *obstacles]
    if wanted == "flash" and obstacles:
        reason = f"flash cannot be had: {'; '.join(obstacles)}"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto, or remove this obstacle")])
    kind: AttentionKind = "plain"
    cost = shape.scores_cost
    if shape.limits or shape.is_long:
        kind, cost = "blocked", shape.blocks_cost(backend)
    if wanted == "plain":
        return AttentionChoice(kind, f"as backend.attention=plain asks; {cost}")
    return AttentionChoice(kind, f"{'; '.join(obstacles)}. {cost}") if obstacles else flash


def context_method(wanted: Literal["auto"] | ContextMethod, backend: str) -> ContextMethod:
    """Method by which context parallel ranks exchange keys and values: `ring` or `gather`.

    `auto` is a ring on cpu and cuda, and a gather elsewhere. A step recorded as one graph is the same on all ranks,
    but the order of a ring depends on the rank. On Trainium no ring transfer within attention has been timed.
    """
    if wanted != "auto":
        return wanted
    if backend in ("cpu", "cuda"):
        return "ring"
    return "gather"


def layout_of_ring(layout: Literal["auto"] | CutLayout) -> CutLayout:
    """Layout of the positions over the ranks of a ring; `auto` takes `striped`, which balances the ranks' work."""
    return "striped" if layout == "auto" else layout
