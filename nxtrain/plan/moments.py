"""Moments of a step in which memory may be highest: activations, gradients and buffers that exist at the same time.

Backward passes free activations while gradients come into being, and buffers of collectives exist near the end only.
So a peak is the largest of a few moments, and less than the sum of all kinds' peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from nxtrain.common.stages import units_of
from nxtrain.parallel.schedule import group_sizes, num_warmup
from nxtrain.plan.activations import (
    attention_work_bytes,
    block_bytes,
    boundary_bytes,
    chunk_bytes,
    first_working_bytes,
    forward_working_bytes,
    kept_logits_bytes,
    norm_work_bytes,
    postponed_block_bytes,
    untracked_bytes,
    working_bytes,
)
from nxtrain.plan.adapters import adapter_entries
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.shapes import block_entries, rest_entries

NORM_ROW_BYTES = 4
"""Bytes that the final norm keeps of each row beside its input: a float32."""

GROUPS = 6
"""Groups of micro-batches in which every state of an interleaved schedule occurs."""


class Moment(NamedTuple):
    """Bytes of a rank at a moment, beside its training state.

    Args:
        grads: Gradients.
        activations: Kept activations, and those of the layer at work.
        logits: A chunk of logits, and what the loss keeps.
        buckets: Buffers of collectives, and gathered parameters.
    """

    grads: int
    activations: int
    logits: int = 0
    buckets: int = 0


def moments_of(job: Job, stage: int) -> Iterator[Moment]:
    """Moments of a step on a pipeline stage."""
    accumulated, reduced = accumulated_bytes(job, stage), reduced_bytes(job, stage)
    if job.is_fully_sharded:
        yield from _gathering(job, stage, 0 if job.has_params_on_host else accumulated)
        return
    yield from _backward(job, stage, accumulated)
    if job.config.parallel.dp > 1:
        yield from _reducing(job, stage, accumulated, reduced)


def _backward(job: Job, stage: int, accumulated: int) -> Iterator[Moment]:
    """Backward passes begin: the first with most micro-batches in flight, and a later one with gradients of others."""
    flights, chunks = in_flight(job, stage), job.config.parallel.virtual_pp
    kept, logits = kept_bytes(job, stage), _logits(job, stage)
    yield Moment(_earlier_grads(job, stage, accumulated), _held(job, stage, kept), logits)
    yield from _forward(job, stage, accumulated)
    if not _repeats(job, stage) and flights > 1:
        yield Moment(accumulated // chunks, _held(job, stage, kept * (flights - 1) // flights), logits)
        if chunks > 1:
            yield Moment(accumulated, _held(job, stage, kept // chunks), logits)
    if job.num_micro == 1:
        yield Moment(accumulated, _working(job, stage))
    if job.postpones:
        yield Moment(accumulated, _split_bytes(job, stage))


def _forward(job: Job, stage: int, accumulated: int, gathered: int = 0) -> Iterator[Moment]:
    """The forward pass of a rank whose only block is the model's first, which may keep little of it beside adapters."""
    if _is_first_block(job, stage):
        others = _kept_of_blocks(job, stage) * (in_flight(job, stage) - 1) // in_flight(job, stage)
        work = forward_working_bytes(job) + job.frozen(stage).largest_matrix
        kept = _on_device(job, others) + _beside_blocks(job, stage) + work
        yield Moment(_earlier_grads(job, stage, accumulated), kept, 0, gathered)


def _is_first_block(job: Job, stage: int) -> bool:
    """True if a rank has the model's first block alone, beside adapters."""
    kind = job.stage(stage)
    return job.adapters is not None and kind.first and sum(kind.blocks) == 1


def _working(job: Job, stage: int) -> int:
    return first_working_bytes(job) if _is_first_block(job, stage) else working_bytes(job)


def _repeats(job: Job, stage: int) -> bool:
    """True if a backward pass comes before the last forward pass."""
    return job.num_micro * job.config.parallel.virtual_pp > in_flight(job, stage)


def _earlier_grads(job: Job, stage: int, accumulated: int) -> int:
    """Gradients when most micro-batches are in flight; of a single group, those of the last chunk alone."""
    parallel = job.config.parallel
    groups = len(group_sizes(parallel.pp, job.num_micro)) if parallel.virtual_pp > 1 else 2
    return (accumulated if groups > 1 else accumulated // parallel.virtual_pp) * _repeats(job, stage)


def _split_bytes(job: Job, stage: int) -> int:
    """Activations when a backward pass without weight gradients comes to its last block, all others of which wait."""
    (number,), waiting = job.stage(stage).blocks, postponed_block_bytes(job)
    postponed = _postponed(job, stage)
    whole = in_flight(job, stage) - postponed - 1
    kept = number * (whole * block_bytes(job) + postponed * waiting) + _beside_blocks(job, stage)
    return kept + (number - 1) * waiting + block_bytes(job) + working_bytes(job)


def _reducing(job: Job, stage: int, accumulated: int, reduced: int) -> Iterator[Moment]:
    """The last backward pass fills its first bucket; then the last bucket is on its way; then parameters are gathered.

    Buckets exist beside what the last micro-batch still keeps. A replicated bucket is one flat copy. ZeRO-1 has a
    bucket packed and scattered, and copies of what is padded or of another type. All parameters are gathered at once
    after the update.
    """
    parallel, entries = job.config.parallel, job.trained(stage)
    reduce = SIZES[job.config.precision.reduce]
    whole = entries.local * reduce
    bucket = min(whole, max(parallel.bucket_mib << 20, entries.largest * reduce))
    buffers = bucket
    if parallel.shard == "zero1":
        given = job.config.precision.accumulate if job.num_micro > 1 else job.config.precision.params
        copies = whole if given != job.config.precision.reduce else entries.padded * reduce
        buffers += min(bucket, copies) + bucket // parallel.dp
    grads = max(accumulated, reduced)
    if not job.is_lazy:
        passed = bucket / whole if whole else 1.0
        kept = int(last_kept_bytes(job, stage) * (1.0 - passed)) + (attention_work_bytes(job) if passed < 1 else 0)
        yield Moment(grads if job.num_micro > 1 else int(passed * accumulated), kept, 0, buffers)
    yield Moment(grads, boundary_bytes(job), 0, buffers)
    if parallel.shard == "zero1":
        yield Moment(reduced, 0, 0, entries.local * job.params_size)


def _gathering(job: Job, stage: int, accumulated: int) -> Iterator[Moment]:
    """Full sharding: a backward pass begins; then the parameters outside the blocks are reduced at its end.

    Gathered are the unit at work and those ahead, or all of them, and always the parameters outside the blocks. Of a
    unit the gradient exists in its own type and in that of the reduction.
    """
    parallel, reduce = job.config.parallel, SIZES[job.config.precision.reduce]
    units = _units(job, stage)
    num_blocks = sum(job.stage(stage).blocks)
    ahead = 0 if parallel.backward_prefetch == "none" else max(1, parallel.prefetch)
    unit = unit_blocks(job, stage)
    whole = num_blocks if parallel.shard == "grad_op" else min(num_blocks, unit * (1 + ahead))
    gathered = units.rest + units.block * whole
    grads = _earlier_grads(job, stage, accumulated)
    kept, own = kept_bytes(job, stage), min(_kept_of_chunks(job, stage))
    yield Moment(grads, _held(job, stage, kept), _logits(job, stage), gathered)
    # A forward pass frees the buffer of a gathered unit when it needs the next.
    yield from _forward(job, stage, accumulated, gathered + (unit * units.block if whole == num_blocks else 0))
    block_grad = unit * units.block_trained * (job.params_size + reduce)
    yield Moment(
        grads,
        kept - min(own, block_bytes(job)) + attention_work_bytes(job),
        _kept_logits(job, stage),
        gathered + block_grad,
    )
    rest_grad = units.rest_trained * (job.params_size + reduce)
    yield Moment(accumulated, _working(job, stage), 0, gathered + rest_grad)


@dataclass(frozen=True)
class _Units:
    """Bytes of a gathered block and of the other parameters, and the entries of their gradients."""

    block: int
    rest: int
    block_trained: int
    rest_trained: int


def _units(job: Job, stage: int) -> _Units:
    kind, tp, size = job.stage(stage), job.config.parallel.tp, job.params_size
    if job.adapters is None:
        block, rest = block_entries(kind, tp, 1).local, rest_entries(kind, tp, 1).local
        return _Units(block * size, rest * size, block, rest)
    adapters, frozen = adapter_entries(kind, tp, 1, job.adapters).local, job.frozen(stage)
    return _Units(frozen.block + adapters * size, frozen.rest, adapters, 0)


def unit_blocks(job: Job, stage: int) -> int:
    """Most blocks of a unit whose parameters are gathered at once."""
    fewest = job.config.parallel.unit_params
    if not fewest:
        return 1
    whole = job.entries(stage, 1).local
    rest, blocks = rest_entries(job.stage(stage), job.config.parallel.tp, 1).local, job.stage(stage).blocks
    block = (whole - rest) // sum(blocks)
    if job.adapters is not None:
        block += adapter_entries(job.stage(stage), job.config.parallel.tp, 1, job.adapters).local
    return max(len(unit) for chunk in blocks for unit in units_of([block] * chunk, fewest))


def _held(job: Job, stage: int, kept: int) -> int:
    """Kept bytes, and those of the layer at work beyond the chunk of logits, which is free by then."""
    last = job.stage(stage).last
    work = _working(job, stage) + (job.frozen(stage).largest_matrix if job.adapters else 0)
    return kept + (max(0, max(work, norm_work_bytes(job)) - chunk_bytes(job)) if last else work)


def _logits(job: Job, stage: int) -> int:
    last = job.stage(stage).last
    return chunk_bytes(job) + kept_logits_bytes(job) if last else 0


def _kept_logits(job: Job, stage: int) -> int:
    return kept_logits_bytes(job) if job.stage(stage).last else 0


def kept_bytes(job: Job, stage: int) -> int:
    """Activations kept for the backward passes of all micro-batches in flight, and the tensors of transfers."""
    return _on_device(job, _kept_of_blocks(job, stage)) + _beside_blocks(job, stage)


def _kept_of_blocks(job: Job, stage: int) -> int:
    parallel, kept = job.config.parallel, _kept_of_chunks(job, stage)
    if parallel.virtual_pp > 1:
        return most_kept(parallel.pp, job.num_micro, stage, kept)
    postponed = _postponed(job, stage)
    waiting = postponed_block_bytes(job) if job.postpones else 0
    return (in_flight(job, stage) - postponed) * kept[0] + postponed * job.stage(stage).blocks[0] * waiting


def _kept_of_chunks(job: Job, stage: int) -> tuple[int, ...]:
    """Bytes that the blocks of each chunk keep of a micro-batch."""
    free = untracked_bytes(job) if job.stage(stage).first else 0
    first, *others = (number * block_bytes(job) for number in job.stage(stage).blocks)
    return first - free, *others


def offloaded_bytes(job: Job, stage: int) -> int:
    """Activations of blocks in host memory."""
    return _kept_of_blocks(job, stage) if job.has_activations_on_host else 0


def _on_device(job: Job, of_blocks: int) -> int:
    """Kept bytes of blocks that stay on the device: of one block alone, if those of others are in host memory."""
    return min(of_blocks, block_bytes(job)) if job.has_activations_on_host else of_blocks


def last_kept_bytes(job: Job, stage: int) -> int:
    """Activations kept when the backward passes of the last micro-batch begin."""
    parallel, kept = job.config.parallel, _kept_of_chunks(job, stage)
    others = (parallel.virtual_pp - 1) * group_sizes(parallel.pp, job.num_micro)[-1]
    of_blocks = kept[-1] + others * max(kept[:-1], default=0)
    return _on_device(job, of_blocks) + _beside_blocks(job, stage)


def _beside_blocks(job: Job, stage: int) -> int:
    # The final norm keeps its input and a number per row.
    norm = job.sequence_rows * (job.dimensions.hidden_size * job.params_size + NORM_ROW_BYTES)
    last = norm if job.stage(stage).last else 0
    return last + (3 * boundary_bytes(job) if job.config.parallel.pp > 1 else 0)


def in_flight(job: Job, stage: int) -> int:
    """Most forwards of a pipeline rank, of any chunk, whose backward is still to come."""
    parallel, total = job.config.parallel, job.num_micro * job.config.parallel.virtual_pp
    if parallel.pp == 1:
        return 1
    warmup = num_warmup(parallel.pp, parallel.virtual_pp, job.num_micro, stage)
    return min(total, warmup + 1 + (stage if parallel.schedule == "zero_bubble" else 0))


def _postponed(job: Job, stage: int) -> int:
    """Micro-batches in flight whose backward waits for its weight part alone, which keeps nothing beside adapters."""
    if job.config.parallel.schedule != "zero_bubble":
        return 0
    return in_flight(job, stage) - min(job.num_micro, num_warmup(job.config.parallel.pp, 1, job.num_micro, stage) + 1)


@lru_cache(maxsize=65_536)
def most_kept(pp: int, num_micro: int, rank: int, kept: tuple[int, ...]) -> int:
    """Most bytes of an interleaved rank, all chunks together, whose forward is done and whose backward is to come.

    Args:
        pp: Ranks of the pipeline.
        num_micro: Micro-batches.
        rank: The rank.
        kept: Bytes that each chunk keeps of a micro-batch.
    """
    sizes = group_sizes(pp, num_micro)[:GROUPS]
    chunks = range(len(kept))
    forwards = [kept[chunk] for size in sizes for chunk in chunks for _ in range(size)]
    backwards = [kept[chunk] for size in sizes for chunk in reversed(chunks) for _ in range(size)]
    begun, done = [0, *accumulate(forwards)], [0, *accumulate(backwards)]
    first = min(len(forwards), num_warmup(pp, len(kept), num_micro, rank) + 1)
    return max(begun[first + ended] - done[ended] for ended in range(len(forwards) - first + 1))


def accumulated_bytes(job: Job, stage: int) -> int:
    """Gradients before their reduction: `.grad`, or the sums of `parallel/data_parallel.py:Bucketed`."""
    entries = job.trained(stage)
    return (entries.rows if job.is_fully_sharded else entries.local) * accumulated_size(job)


def accumulated_size(job: Job) -> int:
    """Bytes of the gradient of each stored entry before its reduction."""
    if job.is_fully_sharded:
        return job.stored_size
    return SIZES[job.config.precision.accumulate] if job.num_micro > 1 else job.params_size


def reduced_bytes(job: Job, stage: int) -> int:
    """Gradients that the optimizer gets, in the type of the reduction."""
    entries = job.trained(stage)
    parallel = job.config.parallel
    if job.is_fully_sharded or parallel.dp == 1:
        return accumulated_bytes(job, stage)
    return (entries.rows if parallel.shard == "zero1" else entries.local) * SIZES[job.config.precision.reduce]
