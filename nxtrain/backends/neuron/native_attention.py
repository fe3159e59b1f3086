"""Choice of the attention kernel on TorchNeuron, and the shapes that each kernel supports.

TorchNeuron runs its flash kernel under `scaled_dot_product_attention`. The limits of that kernel are measurements of
one user of the beta 2.12.3; AWS does not document the limits. Other shapes use the NKI Library's kernels or elementary
operations. For one shape on trn2.3xlarge, the same user measured 6.4 times the time with elementary operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

from nxtrain.backends.attention_choice import (
    AttentionChoice,
    AttentionKind,
    AttentionShape,
    choose_by,
    choose_mixed,
    choose_sinks,
)
from nxtrain.backends.neuron.attention import BOUNDED, misfits_of_bounded
from nxtrain.common.errors import ConfigError, Problem

SEQUENCE_TILE = 512
"""Divisor of the sequence length, in tokens, for TorchNeuron's flash kernel."""
MAX_HEAD_SIZE = 128
"""Largest head size of TorchNeuron's flash kernel."""
MAX_HEADS = 512
"""Most query heads, over all sequences of a micro-batch, of TorchNeuron's flash kernel."""

SWITCH = "TORCH_NEURONX_ENABLE_NKI_SDPA"
"""Environment variable that disables TorchNeuron's flash kernel if its value is 0."""


RING_TILE, LONGEST_RING_PART = 512, 16384
"""Tokens per rank in ring attention: a multiple of the first number, up to the second.

Source: `_K_TILE_SZ` in attention_cte.py, and the longest length that AWS tested, by the notes of
`ring_attention_spmd_fwd`; see `ring_kernels.py`.
"""
MOST_RING_RANKS = 32
"""Most context parallel ranks of ring attention. Source: `_MAX_GLOBAL_CP_DEGREE` in attention_cte.py."""


def choose_native(
    wanted: str, shape: AttentionShape, *, switched_off: bool, library: str, lnc: int = 1
) -> AttentionChoice:
    """Choose between TorchNeuron's attention kernel, the NKI Library's kernels, and elementary operations.

    Args:
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        switched_off: The environment disables TorchNeuron's kernel.
        library: Reason why the NKI Library cannot be used; empty if it is installed.
        lnc: Physical cores per logical core.

    Raises:
        ConfigError: The kernel is wanted but does not support the shape, or plain is wanted but the kernel is enabled.
    """
    if shape.sinks:
        return choose_sinks("neuron-native", wanted, shape)
    if shape.is_mixed:

        def own(alike: AttentionShape) -> AttentionChoice:
            return choose_native(wanted, alike, switched_off=switched_off, library=library, lnc=lnc)

        return cast(AttentionChoice, choose_mixed(own, shape))
    obstacles = _obstacles(shape)
    if switched_off:
        obstacles.insert(0, f"{SWITCH}=0 turns TorchNeuron's kernel off")
    if wanted == "plain" and not obstacles and not shape.limits:
        reason = "is plain, but TorchNeuron computes this shape by its own kernel, inside torch's attention"
        hint = f"use auto, or set {SWITCH}=0 in the environment"
        raise ConfigError([Problem("backend.attention", reason, hint=hint)])
    if shape.limits and wanted != "plain":
        kind: AttentionKind = "bounded"
        kernels = f"{BOUNDED} of keys per query"
        against = misfits_of_bounded(shape, shape.micro_batch * shape.num_heads)
        if shape.cp > 1:
            kind, kernels = "ring", "the NKI Library's ring kernels"
            against = _misfits_of_ring(shape)
        reasons = [library] if library else [*against]
        if not reasons:
            reason = f"{'; '.join(shape.limits)}, by {kernels}, tried when a run starts"
            return AttentionChoice(kind, reason, lnc)
        obstacles.insert(0, f"{kernels} cannot be had: {'; '.join(reasons)}")
    flash = AttentionChoice("flash", "TorchNeuron's kernel, which takes grouped keys and values as they are")
    return choose_by("neuron-native", wanted, shape, obstacles, flash, "TorchNeuron's kernel")


def library_lacking() -> str:
    """Return the reason why the NKI Library cannot be used here; empty if its packages are installed."""
    for name in ("nki", "nkilib"):
        if find_spec(name) is None:
            return f"the package {name} is not installed"
    return ""


def _misfits_of_ring(shape: AttentionShape) -> Iterator[str]:
    """Reasons why the NKI Library's ring attention kernels cannot be used."""
    if shape.cp_method == "gather":
        yield "parallel.cp_method=gather"
    if shape.cp_layout == "zigzag":
        yield "parallel.cp_layout=zigzag, and they take contiguous and striped"
    if shape.documents:
        yield "data.doc_mask=true, and they take documents only if each divides among the ranks"
    if shape.has_window:
        yield "a layer's window, and they take none"
    if shape.cp > MOST_RING_RANKS:
        yield f"parallel.cp={shape.cp}, and they take {MOST_RING_RANKS} ranks at most"
    yield from misfits_of_bounded(replace(shape, seq_len=RING_TILE), shape.micro_batch * shape.num_heads)
    part = shape.seq_len // shape.cp
    if part % RING_TILE or part > LONGEST_RING_PART:
        yield f"{part:,} tokens per rank are not a multiple of {RING_TILE} up to {LONGEST_RING_PART:,}"


def _obstacles(shape: AttentionShape) -> list[str]:
    obstacles = []
    if shape.params != "bf16":
        obstacles.append(
            f"TorchNeuron's kernel multiplies in bf16, which precision.params={shape.params} does not ask for"
        )
    if shape.seq_len % SEQUENCE_TILE:
        obstacles.append(
            f"train.seq_len={shape.seq_len} is not a multiple of {SEQUENCE_TILE}, as TorchNeuron's kernel needs"
        )
    if shape.head_size > MAX_HEAD_SIZE:
        obstacles.append(f"heads are {shape.head_size} wide, and TorchNeuron's kernel takes {MAX_HEAD_SIZE} at most")
    heads = shape.micro_batch * shape.num_heads
    if heads > MAX_HEADS:
        obstacles.append(
            f"train.micro_batch={shape.micro_batch} x {shape.num_heads} heads per rank = {heads}, and TorchNeuron's "
            f"kernel takes {MAX_HEADS} at most"
        )
    return obstacles
