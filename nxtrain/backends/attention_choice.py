"""Choice of the implementation of attention: the shape on which the choice depends, and torch's implementations.

Importable without torch. Trainium's kernels have choices of their own, in `backends/neuron/`.
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
"""Kernels without scores in memory: FlashAttention or NKI's, its releases 3 and 4, cuDNN's, torch's memory-efficient
one, the first of them that a GPU has, and the one that torch takes. NKI's with bounds of keys per query, and NKI's of
ranks that pass keys on. Torch's FlexAttention; elementary operations on all scores; those on the scores of a block of
queries at a time; a call per document."""

CUDA_KERNELS: dict[str, str] = {
    "sdpa": "as torch's release chooses between its kernels",
    "cudnn": "cuDNN's kernel",
    "flash": "FlashAttention 2 of torch",
    "flash3": "FlashAttention 3, from the package flash-attn-3",
    "flash4": "FlashAttention 4, from the package flash-attn-4",
    "efficient": "torch's memory-efficient kernel",
    "fused": "the first of cuDNN's, FlashAttention's and torch's kernels whose trial on the device is right",
}
"""Kernels of torch's causal attention on GPUs, and their names in lines."""

DOCUMENTS = "data.doc_mask=true keeps documents apart"
"""Beginning of the reason for attention inside of documents."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's attention in each block.

    Args:
        micro_batch: Sequences in a micro-batch.
        seq_len: Tokens per sequence, over all context parallel ranks.
        num_heads: Query heads of this rank.
        head_size: Width of a head.
        params: `fp32` or `bf16`, type of queries, keys and values.
        documents: A query sees the keys of its own document only.
        compiled: `torch.compile` makes graphs of the blocks.
        cp: Ranks that share the positions of a sequence.
        cp_method: `parallel.cp_method`.
        cp_layout: `parallel.cp_layout`.
        window: Most keys that a query sees, its own among them; None: no limit.
        full_layers: Number of layers whose queries see all keys before them in spite of the window.
        sinks: Each query head has a score without a key.
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
        """Attention shape of a run."""
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
        """True if some query does not see all keys before it, documents apart."""
        return self.window is not None and self.window < self.seq_len

    @property
    def is_mixed(self) -> bool:
        """True if some layers have a window, and others none."""
        return self.has_window and self.full_layers > 0

    @property
    def limits(self) -> list[str]:
        """Reasons why a query sees other keys than all before it in this rank's rows."""
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
        """True if elementary operations compute the scores of a block at a time."""
        return self.seq_len > LONGEST_SCORES

    @property
    def scores_cost(self) -> str:
        """Sentence with the memory of the scores that elementary operations compute at once."""
        size = 2 if self.params == "bf16" else 4
        mib = self.micro_batch * self.num_heads * self.seq_len**2 * size / 2**20
        return f"Each block's scores take {mib:,.0f} MiB (micro_batch x heads per rank x seq_len^2 x {size} bytes)"

    def blocks_cost(self, backend: str) -> str:
        """Sentences with the work and the memory of attention that is computed block by block.

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
    """Implementation of attention.

    Args:
        kind: The implementation.
        reason: Reason of the choice.
        lnc: Physical cores that share the work of a flash kernel on Trainium.
        has_full_flash: The layers without a window use a flash kernel, unlike those that the choice is for.
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
        """Message with the kind of attention and the reason."""
        return f"{self.kind} attention: {self.reason}"


Choose = Callable[[AttentionShape], AttentionChoice | None]
"""Choice for layers that are all alike."""


def choose_mixed(choose: Choose, shape: AttentionShape) -> AttentionChoice | None:
    """Choice for the layers with a window, with a sentence about the layers without one.

    Args:
        choose: The choice for either kind.
        shape: Shape of the attention, of which some layers have a window.
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
    """Choose between torch's implementations; None: torch's causal attention needs no replacement.

    Args:
        backend: `cpu`, `cuda`, `xla` ...
        wanted: `backend.attention`.
        shape: Shape of one rank's attention.

    Raises:
        ConfigError: The backend has no such kernel, or the kernel does not compute such attention.
    """
    if shape.sinks:
        return choose_sinks(backend, wanted, shape)
    if shape.is_mixed:
        return choose_mixed(partial(choose_torch, backend, wanted), shape)
    if wanted not in ATTENTION[backend]:
        reason = f"{wanted} is no kernel of {backend}, which has torch's attention only"
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
    """Choice for attention with sinks, which is computed block by block on every device.

    Raises:
        ConfigError: A kernel is asked for, and no kernel has sinks.
    """
    if wanted not in ("auto", "plain", "blocked"):
        reason = f"{wanted} has no sinks, which the heads of this model have"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto")])
    return AttentionChoice("blocked", f"heads have sinks. {shape.blocks_cost(backend)}")


def _choose_cuda(wanted: str, shape: AttentionShape) -> AttentionChoice:
    """Choose attention on GPUs for layers that are all alike; trials on the device follow when a run starts.

    Raises:
        ConfigError: The wanted kernel does not compute such attention.
    """
    limits, of_flash = "; ".join(shape.limits), _flash_obstacles(shape)
    obstacles = _obstacles(wanted, shape)
    if wanted == "flex":
        obstacles = _flex_obstacles(shape)
    if obstacles:
        reason = f"{wanted} cannot be had: {'; '.join(obstacles)}"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto, or mend that")])
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
    """Choose attention to some keys on GPUs where FlashAttention does not serve.

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
    """Reasons why FlashAttention cannot be used for queries that do not see all keys before them."""
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
    """Reasons why a configured kernel of `CUDA_KERNELS` cannot be used; none for other values."""
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
    """Attention by the scores of a block at a time, since queries do not see all keys before them."""
    because = "torch's flash kernels take no mask"
    if wanted == "plain":
        because = "backend.attention=plain asks for elementary operations"
    return AttentionChoice("blocked", f"{limits}, and {because}. {shape.blocks_cost(backend)}")


def choose_by(
    backend: str, wanted: str, shape: AttentionShape, obstacles: list[str], flash: AttentionChoice, kernel: str
) -> AttentionChoice:
    """Choose a flash kernel unless something is in its way.

    Args:
        backend: `neuron` or `neuron-native`.
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        obstacles: Reasons why the kernel cannot be used, apart from the keys that queries see.
        flash: Attention by the kernel.
        kernel: Name of the kernel in sentences.

    Raises:
        ConfigError: The kernel is wanted and cannot run in every layer.
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
        raise ConfigError([Problem("backend.attention", reason, hint="use auto, or mend that")])
    kind: AttentionKind = "plain"
    cost = shape.scores_cost
    if shape.limits or shape.is_long:
        kind, cost = "blocked", shape.blocks_cost(backend)
    if wanted == "plain":
        return AttentionChoice(kind, f"as backend.attention=plain asks; {cost}")
    return AttentionChoice(kind, f"{'; '.join(obstacles)}. {cost}") if obstacles else flash


def context_method(wanted: Literal["auto"] | ContextMethod, backend: str) -> ContextMethod:
    """Exchange of keys and values over cp as configured; `auto` is a ring on cpu and cuda.

    Whole recorded steps have one graph for all ranks, and a ring orders its work by rank. On Trainium no transfer in
    the middle of attention was timed.
    """
    if wanted != "auto":
        return wanted
    if backend in ("cpu", "cuda"):
        return "ring"
    return "gather"


def layout_of_ring(layout: Literal["auto"] | CutLayout) -> CutLayout:
    """Positions of a rank of a ring; `auto` takes stripes, which balance the work."""
    return "striped" if layout == "auto" else layout
