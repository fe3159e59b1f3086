"""Moments of a step at which device memory may peak: activations, gradients and buffers that exist at the same time.

Backward passes free activations while they allocate gradients, and buffers of collectives exist only near the end. So
the peak is the largest of a few moments, and less than the sum of the peaks of all kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from nxtrain.common.stages import units_of
from nxtrain.parallel.schedule import group_sizes, num_warmup
from nxtrain.plan.activations import (
    attention_work_bytes,
    block_bytes,
    boundary_bytes,
    first_working_bytes,
    forward_working_bytes,
    norm_work_bytes,
    postponed_block_bytes,
    untracked_bytes,
    working_bytes,
)
from nxtrain.plan.adapters import adapter_entries
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.logits import chunk_bytes, kept_logits_bytes
from nxtrain.plan.muon import muon_work
from nxtrain.plan.shapes import OuterUnits, block_entries, outer_units

NORM_ROW_BYTES = 4
"""Bytes that the final norm saves per row in addition to its input: a float32."""

GROUPS = 6
"""Number of micro-batch groups after which an interleaved schedule only repeats earlier states."""


class Moment(NamedTuple):
    """Device memory of a rank at one moment of a step, in bytes, without the training state.

    Args:
        grads: Gradients.
        activations: Saved activations, and temporary tensors of the current layer.
        logits: A chunk of logits, and the gradients that the loss saves.
        buckets: Buffers of collectives, and gathered parameters.
    """

    grads: int
    activations: int
    logits: int = 0
    buckets: int = 0


def moments_of(job: Job, stage: int) -> Iterator[Moment]:
    """Memory of a rank of a pipeline stage at each moment of a step that may be the peak."""
    accumulated = accumulated_bytes(job, stage)
    if job.config.optim.name == "muon":
        memory = max(work.memory for work in muon_work(job, stage))
        yield Moment(reduced_bytes(job, stage), 0, 0, memory)
    if job.is_fully_sharded:
        if job.has_params_on_host:
            accumulated = 0
        yield from _gathering(job, stage, accumulated)
        return
    yield from _backward(job, stage, accumulated)
    if job.copies > 1:
        yield from _reducing(job, stage, accumulated)


def _backward(job: Job, stage: int, accumulated: int) -> Iterator[Moment]:
    """Moments of backward passes: the first has most micro-batches in flight, later ones have more gradients."""
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
    """Memory in the forward pass of a rank that, with adapters, holds only the model's first block.

    The first block may save little, so that its forward pass may need more memory than its backward pass.
    """
    if _is_first_block(job, stage):
        flights = in_flight(job, stage)
        others = _kept_of_blocks(job, stage) * (flights - 1) // flights
        work = forward_working_bytes(job) + job.frozen(stage).largest_matrix
        kept = _on_device(job, stage, others) + _beside_blocks(job, stage) + work
        yield Moment(_earlier_grads(job, stage, accumulated), kept, 0, gathered)


def _is_first_block(job: Job, stage: int) -> bool:
    """True if a rank's only block is the model's first, and the model has adapters."""
    kind = job.stages[stage]
    return job.adapters is not None and kind.first and kind.num_blocks == 1


def _working(job: Job, stage: int) -> int:
    """Bytes of the largest temporary tensors of any block of a stage, with or without experts."""
    work = first_working_bytes if _is_first_block(job, stage) else working_bytes
    return max(work(kind) for kind in _kinds(job, stage))


def _kinds(job: Job, stage: int) -> list[Job]:
    """Jobs whose blocks a stage has: with experts, as in the model, and without experts."""
    kind = job.stages[stage]
    kinds = []
    if kind.num_blocks > kind.num_dense:
        kinds.append(job)
    if kind.num_dense:
        kinds.append(job.dense)
    return kinds


def _repeats(job: Job, stage: int) -> bool:
    """True if a step has a backward pass before its last forward pass."""
    return job.num_micro * job.config.parallel.virtual_pp > in_flight(job, stage)


def _earlier_grads(job: Job, stage: int, accumulated: int) -> int:
    """Bytes of gradients that exist when most micro-batches are in flight; for a single group, the last chunk's."""
    if not _repeats(job, stage):
        return 0
    parallel = job.config.parallel
    if parallel.virtual_pp > 1 and len(group_sizes(parallel.pp, job.num_micro)) == 1:
        return accumulated // parallel.virtual_pp
    return accumulated


def _split_bytes(job: Job, stage: int) -> int:
    """Bytes of activations in a zero-bubble backward at its last block, when all others postpone weight gradients."""
    num_blocks, waiting = job.stages[stage].num_blocks, postponed_block_bytes(job)
    postponed = _postponed(job, stage)
    whole = in_flight(job, stage) - postponed - 1
    kept = num_blocks * (whole * block_bytes(job) + postponed * waiting) + _beside_blocks(job, stage)
    return kept + (num_blocks - 1) * waiting + block_bytes(job) + working_bytes(job)


def _reducing(job: Job, stage: int, accumulated: int) -> Iterator[Moment]:
    """Moments of the gradient reduction: first bucket full, last bucket in transfer, and parameters being gathered.

    Buckets exist in addition to the activations that the last micro-batch still keeps. A replicated bucket is one flat
    copy. ZeRO-1 has a packed and a scattered bucket, and copies of tensors that are padded or of another type. All
    parameters are gathered at once after the update.
    """
    parallel = job.config.parallel
    precision = job.config.precision
    entries = job.trained(stage)
    is_zero1 = parallel.shard == "zero1"
    reduced, reduce_size = reduced_bytes(job, stage), SIZES[precision.reduce]
    whole = entries.local * reduce_size
    bucket = min(whole, max(parallel.bucket_mib << 20, entries.largest * reduce_size))
    buffers = bucket
    if is_zero1:
        grads_type = precision.accumulate if job.num_micro > 1 else precision.params
        copies = entries.padded * reduce_size
        if grads_type != precision.reduce:
            copies = whole
        buffers += min(bucket, copies) + bucket // job.copies
    grads = max(accumulated, reduced)
    if not job.is_lazy:
        passed = bucket / whole if whole else 1.0
        kept = int(last_kept_bytes(job, stage) * (1.0 - passed))
        if passed < 1:
            kept += attention_work_bytes(job)
        first_grads = int(passed * accumulated)
        if job.num_micro > 1:
            first_grads = grads
        yield Moment(first_grads, kept, 0, buffers)
    yield Moment(grads, boundary_bytes(job), 0, buffers)
    if is_zero1:
        yield Moment(reduced, 0, 0, entries.local * job.params_size)


def _gathering(job: Job, stage: int, accumulated: int) -> Iterator[Moment]:
    """Moments under full sharding: loss, reduction of the output projection, last block, and end of a backward pass.

    Gathered parameters are the current and prefetched units, or all blocks, and always the parameters that form no
    separate unit. Experts divided between ranks are gathered with the unit of their block. A unit's gradient exists
    both in its own type and in the type of the reduction.
    """
    parallel = job.config.parallel
    kind = job.stages[stage]
    tp = job.config.parallel.tp
    trained, outer = block_entries(kind, tp, 1), outer_units(kind, tp)
    outer_trained = outer
    block_size = trained.local * job.params_size
    if job.adapters is not None:
        trained, outer_trained = adapter_entries(kind, tp, 1, job.adapters), OuterUnits(0, 0, 0)
        block_size = job.frozen(stage).block + trained.local * job.params_size
    unit = unit_blocks(job, stage)
    num_gathered = kind.num_blocks
    if parallel.shard != "grad_op":
        units = 1
        if parallel.backward_prefetch != "none":
            units += max(1, parallel.prefetch)
        num_gathered = min(num_gathered, unit * units)
    gathered = outer.rest * job.params_size + block_size * num_gathered
    grads, grad_size = _earlier_grads(job, stage, accumulated), job.params_size + SIZES[job.config.precision.reduce]
    reduced_size = grad_size
    if job.backend == "cpu":  # gloo reduces a copy
        reduced_size += SIZES[job.config.precision.reduce]
    kept = kept_bytes(job, stage)
    head_size = outer.head * job.params_size
    at_loss = outer.rest * job.params_size + 2 * head_size  # torch keeps the buffer of the last gather until then
    if parallel.shard == "grad_op":
        at_loss += block_size * kind.num_blocks
    kept_logits = kept_logits_bytes(job) if kind.last else 0
    yield Moment(grads, _held(job, stage, kept), _logits(job, stage), at_loss)
    copies = outer_trained.head * (reduced_size - job.params_size)  # the matrix itself is freed by then
    yield Moment(grads, kept, kept_logits, gathered + max(head_size, copies))
    sent = outer_trained.head * SIZES[job.config.precision.reduce]  # until the gradients of the last unit are ready
    yield Moment(grads, kept + _working(job, stage), 0, gathered + sent)
    gathered_forward = gathered
    if num_gathered == kind.num_blocks:  # a forward pass frees the buffer of a gathered unit when it needs the next
        gathered_forward += unit * block_size
    yield from _forward(job, stage, accumulated, gathered_forward)
    freed = min(*_kept_of_chunks(job, stage), block_bytes(job))
    kept_logits -= outer_trained.head * job.params_size
    unit_trained = unit * trained.local
    if parallel.ep > 1:  # experts are units of their own, whose gradients are reduced block by block
        unit_trained -= (unit - 1) * trained.experts
    unit_grads = unit_trained * grad_size
    yield Moment(grads, kept - freed + attention_work_bytes(job), kept_logits, gathered + unit_grads)
    during = gathered + outer_trained.rest * job.params_size
    at_end = (outer_trained.embedding + outer_trained.rest) * reduced_size  # all that was gathered is free by then
    yield Moment(accumulated, _working(job, stage), 0, max(during, at_end))


def unit_blocks(job: Job, stage: int) -> int:
    """Most blocks in one FSDP unit, whose parameters are gathered together."""
    fewest = job.config.parallel.unit_params
    if not fewest:
        return 1
    kind, tp = job.stages[stage], job.config.parallel.tp
    block = block_entries(kind, tp, 1).local
    if job.adapters is not None:
        block += adapter_entries(kind, tp, 1, job.adapters).local
    most = 0
    for num_blocks in kind.blocks:
        most = max(most, *(len(unit) for unit in units_of([block] * num_blocks, fewest)))
    return most


def _held(job: Job, stage: int, kept: int) -> int:
    """Saved bytes, plus the current layer's temporary tensors beyond the chunk of logits, which is free by then."""
    work = _working(job, stage) + job.frozen(stage).largest_matrix
    if job.stages[stage].last:
        work = max(0, max(work, norm_work_bytes(job)) - chunk_bytes(job))
    return kept + work


def _logits(job: Job, stage: int) -> int:
    if not job.stages[stage].last:
        return 0
    return chunk_bytes(job) + kept_logits_bytes(job)


def kept_bytes(job: Job, stage: int) -> int:
    """Bytes of activations saved for the backward passes of all micro-batches in flight, and of transferred tensors."""
    return _on_device(job, stage, _kept_of_blocks(job, stage)) + _beside_blocks(job, stage)


def _kept_of_blocks(job: Job, stage: int) -> int:
    parallel, kept = job.config.parallel, _kept_of_chunks(job, stage)
    if parallel.virtual_pp > 1:
        return most_kept(parallel.pp, job.num_micro, stage, kept)
    postponed = _postponed(job, stage)
    num_bytes = (in_flight(job, stage) - postponed) * kept[0]
    if job.postpones:
        num_bytes += postponed * job.stages[stage].num_blocks * postponed_block_bytes(job)
    return num_bytes


def _kept_of_chunks(job: Job, stage: int) -> tuple[int, ...]:
    """Bytes that the blocks of each chunk save for one micro-batch."""
    kept = []
    for part in job.parts[stage]:
        num_dense = sum(index in part.blocks for index in job.dimensions.dense_layers)
        of_part = (len(part.blocks) - num_dense) * block_bytes(job)
        if num_dense:
            of_part += num_dense * block_bytes(job.dense)
        kept.append(of_part)
    if job.stages[stage].first:
        first = job.dense if 0 in job.dimensions.dense_layers else job
        kept[0] -= untracked_bytes(first)
    return tuple(kept)


def offloaded_bytes(job: Job, stage: int) -> int:
    """Bytes of the blocks' activations that are offloaded to host memory."""
    if "activations" not in job.config.parallel.offload:
        return 0
    return _kept_of_blocks(job, stage)


def _on_device(job: Job, stage: int, of_blocks: int) -> int:
    """Bytes of the blocks' activations on the device; with offload those of two blocks, one of them in transfer."""
    if "activations" in job.config.parallel.offload:
        return min(of_blocks, 2 * max(block_bytes(kind) for kind in _kinds(job, stage)))
    return of_blocks


def last_kept_bytes(job: Job, stage: int) -> int:
    """Bytes of activations saved when the backward passes of the last micro-batch begin."""
    parallel, kept = job.config.parallel, _kept_of_chunks(job, stage)
    others = (parallel.virtual_pp - 1) * group_sizes(parallel.pp, job.num_micro)[-1]
    of_blocks = kept[-1] + others * max(kept[:-1], default=0)
    return _on_device(job, stage, of_blocks) + _beside_blocks(job, stage)


def _beside_blocks(job: Job, stage: int) -> int:
    """Bytes of activations outside the blocks: input of the final norm, a number per row, and transferred tensors."""
    num_bytes = 0
    if job.stages[stage].last:
        num_bytes += boundary_bytes(job) + job.sequence_rows * NORM_ROW_BYTES
    if job.config.parallel.pp > 1:
        num_bytes += 3 * boundary_bytes(job)
    return num_bytes


def in_flight(job: Job, stage: int) -> int:
    """Most forwards of a pipeline rank, of any chunk, that await their backward."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 1
    flights = num_warmup(parallel.pp, parallel.virtual_pp, job.num_micro, stage) + 1
    if parallel.schedule == "zero_bubble":
        flights += stage
    return min(job.num_micro * parallel.virtual_pp, flights)


def _postponed(job: Job, stage: int) -> int:
    """Number of micro-batches in flight of which only the weight gradients are still to be computed.

    With adapters these micro-batches keep nothing.
    """
    if job.config.parallel.schedule != "zero_bubble":
        return 0
    return in_flight(job, stage) - min(job.num_micro, num_warmup(job.config.parallel.pp, 1, job.num_micro, stage) + 1)


@lru_cache(maxsize=65_536)
def most_kept(pp: int, num_micro: int, rank: int, kept: tuple[int, ...]) -> int:
    """Most bytes of activations that a rank of an interleaved schedule holds, over all chunks.

    Args:
        pp: Number of pipeline ranks.
        num_micro: Number of micro-batches.
        rank: Pipeline rank.
        kept: Bytes that each chunk saves for a micro-batch.
    """
    forwards: list[int] = []
    backwards: list[int] = []
    for size in group_sizes(pp, num_micro)[:GROUPS]:
        for chunk in kept:
            forwards += [chunk] * size
        for chunk in reversed(kept):
            backwards += [chunk] * size
    begun, done = [0, *accumulate(forwards)], [0, *accumulate(backwards)]
    first = min(len(forwards), num_warmup(pp, len(kept), num_micro, rank) + 1)
    return max(begun[first + ended] - done[ended] for ended in range(len(forwards) - first + 1))


def accumulated_bytes(job: Job, stage: int) -> int:
    """Bytes of gradients before their reduction: `.grad`, or the sums of `parallel/data_parallel.py:Bucketed`."""
    entries = job.trained(stage)
    if job.is_fully_sharded:
        return entries.rows * accumulated_size(job)
    return entries.local * accumulated_size(job)


def accumulated_size(job: Job) -> int:
    """Bytes of the gradient per stored parameter, before its reduction."""
    if job.is_fully_sharded:
        return job.stored_size
    if job.num_micro > 1:
        return SIZES[job.config.precision.accumulate]
    return job.params_size


def reduced_bytes(job: Job, stage: int) -> int:
    """Bytes of the gradients that the optimizer gets, in the type of the reduction."""
    parallel = job.config.parallel
    if job.is_fully_sharded or job.copies == 1:
        return accumulated_bytes(job, stage)
    entries = job.trained(stage)
    if parallel.shard == "zero1":
        return entries.rows * SIZES[job.config.precision.reduce]
    return entries.local * SIZES[job.config.precision.reduce]
