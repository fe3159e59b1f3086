"""Work of Muon on one rank: operations, transfers and memory of whole matrices, and the entries with one mean.

Counts mirror `parallel/whole_matrices.py` and `optim/newton_schulz.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from nxtrain.common.dimensions import is_matrix
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
"""Rate of float32 products over that of bfloat16, by kind of machine; trn1: 47.5 of 190 TFLOPS."""

GPU_FP32_SHARE = 1 / 16
"""The same on GPUs, without TF32; A100: 19.5 of 312 TFLOPS."""


class MuonWork(NamedTuple):
    """Work of an update on one rank.

    Args:
        flops: Operations of Newton-Schulz steps.
        holders: Ranks of shard x tp, which exchange rows.
        helpers: Replicas that share the work.
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
    """Matrices of each block of a stage, by their names inside the block."""
    return {name: spec for name, spec in stage.block_specs(tp).items() if is_matrix(spec)}


def hidden_entries(job: Job, stage: int) -> Entries:
    """Entries of a stage that have one running mean; none if AdamW updates all."""
    if job.config.optim.name != "muon":
        return Entries(0, 0, 0)
    kind = job.stage(stage)
    return sum_entries(hidden_specs(kind, job.config.parallel.tp), job.config.parallel.tp, job.shard_size).times(
        kind.num_blocks
    )


def num_hidden(job: Job) -> int:
    """Entries of the whole model that have one running mean."""
    if job.config.optim.name != "muon":
        return 0
    total = 0
    for kind in job.stages:
        total += kind.num_blocks * sum(math.prod(spec.shape) for spec in hidden_specs(kind, 1).values())
    return total


def muon_work(job: Job, stage: int) -> MuonWork:
    """Work of Muon on a rank of a stage; nothing if AdamW updates all."""
    optim, parallel = job.config.optim, job.config.parallel
    if optim.name != "muon":
        return MuonWork(0, 1, 1, 0, 0, 0)
    blocks = -(-job.dimensions.num_layers // parallel.pp)
    replicas = job.copies // job.shard_size
    return _work(job.stage(stage), parallel.tp, job.shard_size, replicas, blocks, optim.muon_steps)


@lru_cache(maxsize=4096)
def _work(  # 6 arguments that a search repeats
    stage: Stage, tp: int, shard: int, replicas: int, blocks: int, steps: int
) -> MuonWork:
    matrices = {}
    for block in range(stage.num_blocks):
        for name, spec in hidden_specs(stage, tp).items():
            matrices[f"{block}.{name}"] = spec
    axis, holders = axis_of(tp), shard * tp
    helpers = num_helpers(replicas, holders, blocks)
    rounds = rounds_of(matrices, holders * helpers)
    exchanged, gathered = exchanged_bytes(rounds, axis, shard, helpers)
    flops = memory = 0
    for each in rounds:
        flops += matrix_flops(each.spec, steps)
        piece = math.prod(piece_shape(each.spec, axis, shard)) * EXCHANGED_BYTES
        # Rows of the round's matrices and of all slots; slots before and after the work, and its result.
        slots = len(each.names) + holders * (2 * helpers + 3)
        largest = max(math.prod(each.spec.global_shape(segment)) for segment in each.spec.segments)
        memory = max(memory, slots * piece + 3 * largest * EXCHANGED_BYTES)
    return MuonWork(flops, holders, helpers, exchanged, gathered, memory)


def products_s(job: Job, stage: int, products: float) -> float:
    """Seconds of Newton-Schulz steps.

    Args:
        job: The run.
        stage: Pipeline stage.
        products: Share of the peak that matrix products reach.
    """
    share = 1.0
    if job.config.optim.muon_precision == "fp32":
        share = FP32_SHARE.get(job.machine.kind, GPU_FP32_SHARE)
    return muon_work(job, stage).flops / (job.machine.device_flops * products * share)
