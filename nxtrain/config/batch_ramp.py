"""Keys of the batch ramp, and the global batch of each step that they mean."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.errors import Problem
from nxtrain.config.section import NonNegativeInt, Section, Size


class RampStageConfig(Section):
    """An entry of train.batch_ramp: a part of the run with a smaller global batch."""

    global_batch: Size
    """Sequences per update, over all dp ranks."""
    samples: NonNegativeInt = 0
    """Sequences that are trained with it."""
    tokens: NonNegativeInt = 0
    """Tokens that are trained with it, in place of samples."""


Ramp = tuple[RampStageConfig, ...]


def batch_sizes(ramp: Ramp, global_batch: int, seq_len: int, *, step: int = 0, tokens: int = 0) -> BatchSizes:
    """Global batch of each update.

    Args:
        ramp: Stages of the ramp.
        global_batch: Sequences per update after the ramp.
        seq_len: Tokens per sequence.
        step: Finished updates of the run that goes on.
        tokens: Tokens that these updates have seen.
    """
    stages, limit = [], 0
    for stage in ramp:
        limit += stage.tokens or stage.samples * seq_len
        stages.append((limit, stage.global_batch))
    return BatchSizes.ramp(global_batch, stages, seq_len, step=step, tokens=tokens)


def ramp_problems(ramp: Ramp, multiple: int) -> Iterator[Problem]:
    """Problems of the stages of a ramp.

    Args:
        ramp: The stages.
        multiple: Sequences of a micro-batch on all dp ranks.
    """
    for number, stage in enumerate(ramp, 1):
        batch = stage.global_batch
        if bool(stage.samples) == bool(stage.tokens):
            reason = f"stage {number} has samples={stage.samples} and tokens={stage.tokens}, and needs one of them"
            hint = f"write such as {{global_batch = {batch}, samples = {1000 * batch}}}"
            yield Problem("train.batch_ramp", reason, hint=hint)
        if batch % multiple:
            low = batch // multiple * multiple
            works = " or ".join(str(size) for size in (low, low + multiple) if size)
            reason = f"stage {number}: global_batch={batch} is not a multiple of micro_batch x dp = {multiple}"
            yield Problem("train.batch_ramp", reason, hint=f"use {works} there, or a smaller train.micro_batch")
