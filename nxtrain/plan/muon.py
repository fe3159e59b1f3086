"""Predicted work of Muon on one rank: operations, transfers and memory, and the parameters with one running mean.

Counts follow `parallel/whole_matrices.py` and `optim/newton_schulz.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from nxtrain.common.sharding import ShardSpec
from nxtrain.parallel.matrix_rounds import (
    EXCHANGED_BYTES,
    exchanged_bytes,
    matrix_flops,
    num_helpers,
    piece_shape,
    rounds_of,
)
from nxtrain.plan.job import Job
from nxtrain.plan.shapes import Entries, Stage, axis_of, sum_entries

FP32_SHARE = {"trn1": 1 / 4, "trn2": 1 / 4, "trn3": 1 / 4, "cpu": 1.0}
"""Rate of float32 matrix products relative to bfloat16, by kind of machine; trn1: 47.5 of 190 TFLOPS."""

GPU_FP32_SHARE = 1 / 16
"""Rate of float32 matrix products relative to bfloat16 on GPUs, without TF32; A100: 19.5 of 312 TFLOPS."""


class MuonWork(NamedTuple):
    """Work of one Muon update on one rank.

    Args:
        flops: Operations of Newton-Schulz steps.
        holders: Number of ranks of shard x tp, which exchange rows.
        helpers: Number of replicas that divide the matrices.
        exchanged: Bytes that a rank sends to the other holders.
        gathered: Bytes that a rank sends to the other helpers.
        memory: Bytes of the largest round: rows, exchanges and products.
    """

    flops: int
    holders: int
    helpers: int
    exchanged: int
    gathered: int
    memory: int


def hidden_specs(stage: Stage, tp: int) -> dict[str, ShardSpec]:
    """Sharding of the matrices of each block of a stage, by parameter name inside the block."""
    return {name: spec for name, spec in stage.block_specs(tp).items() if len(spec.shape) > 1}


def _hidden_kinds(stage: Stage, tp: int) -> list[tuple[int, dict[str, ShardSpec]]]:
    """Number of blocks and their matrices, for blocks with experts and for blocks without."""
    with_experts = stage.num_blocks - stage.num_dense
    return [(with_experts, hidden_specs(stage, tp)), (stage.num_dense, hidden_specs(stage.dense, tp))]


def hidden_entries(job: Job, stage: int) -> Entries:
    """Number of a stage's parameters that Muon updates, with one running mean each; none if AdamW updates all."""
    total = Entries(0, 0, 0)
    if job.config.optim.name == "muon":
        kind, tp = job.stages[stage], job.config.parallel.tp
        for number, specs in _hidden_kinds(kind, tp):
            total = total.plus(sum_entries(specs, tp, job.shard_size, kind.ep).times(number))
    return total


def num_hidden(job: Job) -> int:
    """Number of the whole model's parameters that Muon updates, with one running mean each."""
    if job.config.optim.name != "muon":
        return 0
    total = 0
    for kind in job.stages:
        for number, specs in _hidden_kinds(replace(kind, ep=1), 1):
            total += number * sum(math.prod(spec.shape) for spec in specs.values())
    return total


def muon_work(job: Job, stage: int) -> tuple[MuonWork, ...]:
    """Work of Muon on a rank of a stage: for matrices shared by dp x cp, then for experts; empty without Muon."""
    optim, parallel = job.config.optim, job.config.parallel
    if optim.name != "muon":
        return ()
    blocks = -(-job.dimensions.num_layers // parallel.pp)
    kind, shard = job.stages[stage], job.shard_size
    work = [_work(kind, parallel.tp, shard, job.copies // shard, blocks, optim.muon_steps, False)]
    if job.dimensions.mixture is not None:
        shard = max(1, shard // parallel.ep)
        replicas = job.copies // (shard * parallel.ep)
        work.append(_work(kind, parallel.tp, shard, replicas, blocks, optim.muon_steps, True))
    return tuple(work)


@lru_cache(maxsize=4096)
def _work(  # 7 arguments that a search repeats
    stage: Stage, tp: int, shard: int, replicas: int, blocks: int, steps: int, of_experts: bool
) -> MuonWork:
    matrices = {}
    for kind, (number, specs) in enumerate(_hidden_kinds(stage, tp)):
        for block in range(number):
            own = {name: spec for name, spec in specs.items() if spec.expert == of_experts}
            matrices.update({f"{kind}.{block}.{name}": spec for name, spec in own.items()})
    axis, holders = axis_of(tp), shard * tp
    helpers = num_helpers(replicas, holders, blocks)
    rounds = rounds_of(matrices, holders * helpers)
    exchanged, gathered = exchanged_bytes(rounds, axis, shard, helpers)
    flops = memory = 0
    for round_ in rounds:
        flops += matrix_flops(round_.spec, steps)
        piece = math.prod(piece_shape(round_.spec, axis, shard)) * EXCHANGED_BYTES
        # Rows of the round's matrices and of all slots, slots before and after the exchange, and the results.
        slots = len(round_.names) + holders * (2 * helpers + 3)
        largest = max(math.prod(round_.spec.global_shape(segment)) for segment in round_.spec.segments)
        memory = max(memory, slots * piece + 3 * largest * EXCHANGED_BYTES)
    return MuonWork(flops, holders, helpers, exchanged, gathered, memory)


def products_s(job: Job, stage: int, products: float) -> float:
    """Seconds of the Newton-Schulz steps of an update.

    Args:
        job: The run.
        stage: Pipeline stage.
        products: Share of the peak that matrix products reach.
    """
    share = 1.0
    if job.config.optim.muon_precision == "fp32":
        share = FP32_SHARE.get(job.machine.kind, GPU_FP32_SHARE)
    return sum(work.flops for work in muon_work(job, stage)) / (job.machine.device_flops * products * share)
