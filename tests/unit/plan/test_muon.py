"""Plans of a run with Muon: state with one mean, operations and transfers by hand, memory of the update."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.plan.job import Job
from nxtrain.plan.memory import checkpoint_bytes, optimizer_bytes, stage_bytes
from nxtrain.plan.muon import hidden_specs, muon_work, num_hidden
from nxtrain.plan.speed import SPEEDS, step_time
from nxtrain.tools.trace.fake_rank import trace_job
from tests.support.models import plan

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 4, 64, 176, 8, 4, 8
SHAPE = {
    "vocab_size": 100,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}
PER_BLOCK = HIDDEN * (2 * HEADS * WIDTH + 2 * KV_HEADS * WIDTH + 3 * INNER)
"""Entries of the matrices of a block."""


EXPERTS = {
    "family": "qwen3_moe",
    "config": {**SHAPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}
"""Blocks with experts."""


def job_of(
    name: str = "muon", machine: str = "p5.48xlarge", optim: Any = None, model: Any = None, **parallel: Any
) -> Job:
    resolved = plan(
        "mha",
        model=model or {"config": SHAPE},
        parallel={"dp": 1, **parallel},
        train={"seq_len": 16, "micro_batch": 1, "global_batch": 8},
        optim={"name": name, **(optim or {})},
        backend={"name": "cuda"},
    )
    return Job(resolved.dimensions, MACHINES[machine], 1, resolved.config)


def test_matrices_of_blocks_have_one_mean_in_state_and_checkpoints() -> None:
    muon, adamw = job_of(), job_of("adamw")
    saved = 4 * LAYERS * PER_BLOCK
    assert num_hidden(muon) == LAYERS * PER_BLOCK
    assert optimizer_bytes(adamw, 0) - optimizer_bytes(muon, 0) == saved
    params = 1_000_000
    assert checkpoint_bytes(adamw, params) - checkpoint_bytes(muon, params) == saved
    averaged = job_of(optim={"ema_decay": 0.999})
    assert checkpoint_bytes(averaged, params) - checkpoint_bytes(muon, params) == 4 * params


def flops(rows: int, columns: int) -> int:
    small, large = sorted((rows, columns))
    return 5 * (2 * small * small * large + 2 * small**3 + 2 * small * small * large)


SEGMENTS = {
    "self_attn.qkv_proj.weight": [(HEADS * WIDTH, HIDDEN), (KV_HEADS * WIDTH, HIDDEN), (KV_HEADS * WIDTH, HIDDEN)],
    "self_attn.o_proj.weight": [(HIDDEN, HEADS * WIDTH)],
    "mlp.gate_up_proj.weight": [(INNER, HIDDEN), (INNER, HIDDEN)],
    "mlp.down_proj.weight": [(HIDDEN, INNER)],
}


@pytest.mark.parametrize(
    ("parallel", "holders", "helpers", "blocks"),
    [
        ({}, 1, 1, 4),
        ({"dp": 2}, 1, 2, 2),
        ({"dp": 8}, 1, 4, 1),
        ({"tp": 2, "dp": 2}, 2, 2, 1),
        ({"tp": 2}, 2, 1, 2),
        ({"dp": 8, "shard": "zero1"}, 8, 1, 1),
        ({"pp": 2, "dp": 4}, 1, 2, 1),
    ],
)
def test_operations_and_bytes_are_those_of_a_block_or_a_few(
    parallel: dict[str, Any], holders: int, helpers: int, blocks: int
) -> None:
    """Each rank orthogonalizes the matrices of some blocks, and exchanges padded rows of them."""
    job = job_of(**parallel)
    (work,) = muon_work(job, 0)
    assert set(hidden_specs(job.stages[0], 1)) == set(SEGMENTS)
    assert (work.holders, work.helpers) == (holders, helpers)
    assert work.flops == blocks * sum(flops(*shape) for shapes in SEGMENTS.values() for shape in shapes)
    tp, shard = parallel.get("tp", 1), holders // parallel.get("tp", 1)
    entries = 0
    for name, shapes in SEGMENTS.items():
        rows = math.ceil(
            sum(shape[0] for shape in shapes) / (1 if name.endswith(("o_proj.weight", "n_proj.weight")) else tp)
        )
        columns = shapes[0][1] // (tp if name.endswith(("o_proj.weight", "n_proj.weight")) else 1)
        entries += blocks * math.ceil(rows / shard) * columns
    assert work.exchanged == 2 * (holders - 1) * entries * 4
    assert work.gathered == (helpers - 1) * holders * entries * 4


@pytest.mark.parametrize(("machine", "share"), [("p5.48xlarge", 1 / 16), ("trn1.32xlarge", 1 / 4)])
def test_float32_products_take_the_time_of_a_slower_rate(machine: str, share: float) -> None:
    fp32, bf16, adamw = (
        job_of(machine=machine),
        job_of(machine=machine, optim={"muon_precision": "bf16"}),
        job_of("adamw", machine=machine),
    )
    rate = MACHINES[machine].device_flops * SPEEDS[MACHINES[machine].kind].products
    seconds = muon_work(fp32, 0)[0].flops / rate
    assert step_time(fp32).update_s - step_time(bf16).update_s == pytest.approx(seconds * (1 / share - 1))
    assert step_time(bf16).update_s < step_time(adamw).update_s + seconds, "less state is read and written"


def test_transfers_of_the_update_are_traffic_of_their_own() -> None:
    job = job_of(tp=2, dp=2)
    (work,), result = muon_work(job, 0), step_time(job)
    rows = [traffic for traffic in result.traffic if traffic.axis == "update"]
    assert [traffic.bytes for traffic in rows] == [work.exchanged, work.gathered]
    assert all(traffic.seconds > 0 and traffic.hidden == 0 for traffic in rows)
    assert result.step_s == pytest.approx(sum(result.parts.values()))
    assert not [traffic for traffic in step_time(job_of("adamw", tp=2, dp=2)).traffic if traffic.axis == "update"]


def test_experts_are_matrices_of_their_own_on_the_ranks_that_hold_them() -> None:
    whole, divided = job_of(model=EXPERTS, dp=4), job_of(model=EXPERTS, dp=4, ep=4)
    per_expert = 2 * flops(24, HIDDEN) + flops(HIDDEN, 24)
    assert [work.flops for work in muon_work(divided, 0)][1] == LAYERS * 2 * per_expert
    assert [work.flops for work in muon_work(whole, 0)][1] == LAYERS // 4 * 8 * per_expert
    assert [(work.holders, work.helpers) for work in muon_work(divided, 0)] == [(1, 4), (1, 1)]
    matrices = 2 * HEADS * 8 * HIDDEN + 2 * KV_HEADS * 8 * HIDDEN + 8 * HIDDEN + 8 * 3 * 24 * HIDDEN
    assert num_hidden(divided) == num_hidden(whole) == LAYERS * matrices


@pytest.mark.parametrize("parallel", [{}, {"dp": 4, "shard": "hybrid", "shard_size": 2}], ids=["alone", "hybrid"])
def test_memory_of_a_traced_step_is_the_predicted(parallel: dict[str, Any]) -> None:
    """So few tokens that the update needs most."""
    job = job_of(**parallel)
    predicted, traced = stage_bytes(job, 0), trace_job(job, 0)
    assert traced.optimizer == predicted.optimizer
    assert predicted.total - predicted.workspace == pytest.approx(traced.total, rel=0.1)
