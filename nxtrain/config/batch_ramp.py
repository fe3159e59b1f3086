"""Configuration of ramps of the global batch and of the sequence length, and their values at each step."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.batch_sizes import BatchSizes, SeqLengths
from nxtrain.common.errors import Problem
from nxtrain.config.section import NonNegativeInt, PositiveInt, Section, Size


class RampStageConfig(Section):
    """An entry of train.batch_ramp: a stage of the run with a smaller global batch."""

    global_batch: Size
    """Sequences per update in this stage, over all dp ranks."""
    samples: NonNegativeInt = 0
    """Length of this stage in sequences."""
    tokens: NonNegativeInt = 0
    """Length of this stage in tokens, in place of samples."""


class SeqStageConfig(Section):
    """An entry of train.seq_ramp: a stage of the run with shorter sequences."""

    seq_len: Size
    """Tokens per sequence in this stage. Several sequences share a row."""
    tokens: PositiveInt
    """Length of this stage in tokens."""


Ramp = tuple[RampStageConfig, ...]
SeqRamp = tuple[SeqStageConfig, ...]


def batch_sizes(ramp: Ramp, global_batch: int, seq_len: int, *, step: int = 0, tokens: int = 0) -> BatchSizes:
    """Global batch size of each update, from the configured ramp.

    Args:
        ramp: Stages of the ramp.
        global_batch: Sequences per update after the ramp.
        seq_len: Tokens per sequence.
        step: Finished updates of a resumed run.
        tokens: Tokens that the finished updates have consumed.
    """
    stages, limit = [], 0
    for stage in ramp:
        limit += stage.tokens or stage.samples * seq_len
        stages.append((limit, stage.global_batch))
    return BatchSizes.ramp(global_batch, stages, seq_len, step=step, tokens=tokens)


def seq_lengths(ramp: SeqRamp, seq_len: int, sizes: BatchSizes, *, step: int = 0, tokens: int = 0) -> SeqLengths | None:
    """Sequence length of each update, from the configured ramp; None without a ramp.

    Args:
        ramp: Stages of the ramp.
        seq_len: Tokens of a row, which is also the sequence length after the ramp.
        sizes: Global batch size of each update, from `batch_sizes`.
        step: Finished updates of a resumed run.
        tokens: Tokens that the finished updates have consumed.
    """
    if not ramp:
        return None
    # The number of tokens seen is the state, also where an earlier part of the run had another global batch.
    limit = sizes.before(step) * seq_len - tokens
    stages = []
    for stage in ramp:
        limit += stage.tokens
        stages.append((limit, stage.seq_len))
    return SeqLengths(seq_len, tuple(stages), sizes)


def seq_ramp_problems(ramp: SeqRamp, seq_len: int, *, doc_mask: bool, objective: str) -> Iterator[Problem]:
    """Check the stages of a sequence length ramp, and yield their problems.

    Args:
        ramp: The stages.
        seq_len: Tokens of a row.
        doc_mask: Value of data.doc_mask, which keeps the sequences of a row apart.
        objective: Value of finetune.objective.
    """
    for number, stage in enumerate(ramp, 1):
        if seq_len % stage.seq_len or stage.seq_len == seq_len:
            reason = f"stage {number}: a row of train.seq_len={seq_len} does not hold several of {stage.seq_len} tokens"
            yield Problem("train.seq_ramp", reason, hint="use a smaller divisor of train.seq_len there")
    if ramp and not doc_mask:
        reason = "shorter sequences share a row, and need document masks to be kept apart"
        yield Problem("train.seq_ramp", reason, hint="set data.doc_mask=true")
    if ramp and objective != "sft":
        reason = f"finetune.objective={objective} needs whole answers, which shorter sequences would cut"
        yield Problem("train.seq_ramp", reason, hint="leave train.seq_ramp out")


def ramp_problems(ramp: Ramp, multiple: int) -> Iterator[Problem]:
    """Check the stages of a global batch ramp, and yield their problems.

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
