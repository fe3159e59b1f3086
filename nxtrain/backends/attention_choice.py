"""Choice of attention: the shape that it depends on, its name in lines for people, and the choice of torch's own.

Importable without torch. Trainium's kernels have choices of their own, in `backends/neuron/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import ConfigError, Problem

if TYPE_CHECKING:
    from nxtrain.config.schema import RunConfig

AttentionKind = Literal["flash", "plain", "masked", "per-document"]
"""Kernel without scores in memory; elementary operations; all scores and a mask of documents; a call per document."""

DOCUMENTS = "data.doc_mask=true keeps documents apart"
"""Beginning of the reason for attention inside of documents."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's attention in each block.

    Args:
        micro_batch: Sequences in a micro-batch.
        seq_len: Tokens per sequence.
        num_heads: Query heads of this rank.
        head_size: Width of a head.
        params: `fp32` or `bf16`, type of queries, keys and values.
        documents: A query sees the keys of its own document only.
        compiled: `torch.compile` makes graphs of the blocks.
    """

    micro_batch: int
    seq_len: int
    num_heads: int
    head_size: int
    params: str
    documents: bool = False
    compiled: bool = False

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
            compiled=config.compile.torch_compile,
        )

    @property
    def scores_cost(self) -> str:
        """Sentence with the memory of the scores that elementary operations compute."""
        size = 2 if self.params == "bf16" else 4
        mib = self.micro_batch * self.num_heads * self.seq_len**2 * size / 2**20
        return f"Each block's scores take {mib:,.0f} MiB (micro_batch x heads per rank x seq_len^2 x {size} bytes)"

    @property
    def mask_cost(self) -> str:
        """Sentence with the work and the memory of a fused kernel that gets a mask."""
        mib = self.micro_batch * self.seq_len**2 / 2**20
        return (
            "All seq_len^2 scores are computed, twice those of causal attention, and each block makes a mask of "
            f"{mib:,.3g} MiB (micro_batch x seq_len^2 bytes)"
        )


@dataclass(frozen=True)
class AttentionChoice:
    """Implementation of attention.

    Args:
        kind: The implementation.
        reason: Reason of the choice.
        lnc: Physical cores that share the work of a flash kernel on Trainium.
    """

    kind: AttentionKind
    reason: str
    lnc: int = 1

    @property
    def is_flash(self) -> bool:
        """True for a flash kernel."""
        return self.kind == "flash"

    def __str__(self) -> str:
        """Line for people."""
        return f"{self.kind} attention: {self.reason}"


def choose_torch(backend: str, wanted: str, shape: AttentionShape) -> AttentionChoice | None:
    """Choose between torch's implementations; None: rows are one document, and torch's attention serves as it is.

    Args:
        backend: `cpu`, `cuda`, `xla` ...
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.

    Raises:
        ConfigError: A flash kernel is wanted.
    """
    if wanted == "flash":
        reason = f"flash is a kernel of backend.name=neuron and neuron-native; {backend} has torch's attention only"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto")])
    if not shape.documents:
        return None
    if backend == "cpu" and not shape.compiled:
        return AttentionChoice(
            "per-document", f"{DOCUMENTS} by a call for each; no score between documents is computed"
        )
    cost = shape.scores_cost if backend == "xla" else shape.mask_cost
    return AttentionChoice("masked", f"{DOCUMENTS}, and torch's flash kernels take no mask. {cost}")


def choose_by(
    wanted: str, shape: AttentionShape, obstacles: list[str], flash: AttentionChoice, kernel: str
) -> AttentionChoice:
    """Choose a flash kernel unless something is in its way.

    Args:
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        obstacles: Reasons against the kernel, documents apart.
        flash: Attention by the kernel.
        kernel: Name of the kernel in sentences.

    Raises:
        ConfigError: The kernel is wanted and cannot run.
    """
    if shape.documents:
        obstacles = [f"{DOCUMENTS}, and {kernel} takes no mask", *obstacles]
    kind: AttentionKind = "masked" if shape.documents else "plain"
    if wanted == "flash" and obstacles:
        reason = f"flash cannot be had: {'; '.join(obstacles)}"
        raise ConfigError([Problem("backend.attention", reason, hint="use auto, or mend that")])
    if wanted == "plain":
        return AttentionChoice(kind, f"as backend.attention=plain asks; {shape.scores_cost}")
    return AttentionChoice(kind, f"{'; '.join(obstacles)}. {shape.scores_cost}") if obstacles else flash
