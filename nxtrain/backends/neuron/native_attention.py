"""Attention of TorchNeuron: its flash kernel under `scaled_dot_product_attention`, and the conditions of the kernel.

Names and limits are measurements of one user of the beta 2.12.3; AWS's pages do not list them. Elementary operations
compute a shape that does not fit. For one shape on trn2.3xlarge, that user measured 6.4 times the time.
"""

from __future__ import annotations

from dataclasses import replace

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape, choose_by
from nxtrain.common.errors import ConfigError, Problem

SEQUENCE_TILE = 512
"""Tokens that divide a sequence."""
MAX_HEAD_SIZE = 128
"""Width of the widest head."""
MAX_HEADS = 512
"""Most heads of all sequences of a micro-batch."""

SWITCH = "TORCH_NEURONX_ENABLE_NKI_SDPA"
"""Variable that turns the kernel off if it is 0."""


def choose_native(wanted: str, shape: AttentionShape, *, switched_off: bool) -> AttentionChoice:
    """Choose between TorchNeuron's kernel and elementary operations.

    Args:
        wanted: `auto`, `plain` or `flash`.
        shape: Shape of one rank's attention.
        switched_off: The environment turns the kernel off.

    Raises:
        ConfigError: The kernel is wanted and the shape does not fit, or is not wanted and not switched off.
    """
    obstacles = _obstacles(shape)
    if switched_off:
        obstacles.insert(0, f"{SWITCH}=0 turns TorchNeuron's kernel off")
    without_window = shape
    if shape.is_mixed:
        without_window = replace(shape, window=None)
    if wanted == "plain" and not obstacles and not without_window.limits:
        reason = "plain, but TorchNeuron computes this shape by its own kernel, behind torch's attention"
        hint = f"use auto, or set {SWITCH}=0 in the environment"
        raise ConfigError([Problem("backend.attention", reason, hint=hint)])
    flash = AttentionChoice("flash", "TorchNeuron's kernel, which takes grouped keys and values as they are")
    return choose_by("neuron-native", wanted, shape, obstacles, flash, "TorchNeuron's kernel")


def _obstacles(shape: AttentionShape) -> list[str]:
    obstacles = []
    if shape.params != "bf16":
        obstacles.append(
            f"TorchNeuron's kernel multiplies in bf16, which precision.params={shape.params} does not ask for"
        )
    if shape.seq_len % SEQUENCE_TILE:
        obstacles.append(
            f"train.seq_len={shape.seq_len} is no multiple of {SEQUENCE_TILE}, as TorchNeuron's kernel needs"
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
