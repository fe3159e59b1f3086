"""Plans of models with experts: parameters of a rank, exchanged bytes, and layouts with expert parallelism."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from nxtrain.common.dimensions import Dimensions, MoeShape
from nxtrain.common.family import find_family
from nxtrain.plan.experts import exchange_bytes
from nxtrain.plan.job import Job
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.predict import Assumptions
from nxtrain.plan.search import impossible, search
from nxtrain.plan.speed import step_time
from nxtrain.plan.traffic import Links, exchange_s, sync_bytes
from nxtrain.plan.work import adapter_params, model_flops_per_token, trained_params
from tests.support.published import job_of

ROW: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "instance": "p5.48xlarge",
    "nodes": 2,
    "tp": 1,
    "pp": 1,
    "shard": "zero1",
    "seq_len": 4096,
    "global_batch": 64,
    "remat": "none",
}


def job(**changes: Any) -> Job:
    return job_of({**ROW, **changes})


@pytest.mark.parametrize(
    ("family", "preset", "total", "active"),
    [
        ("mixtral", "mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral", "mixtral-8x22b", 140.6e9, 39.2e9),
        ("qwen3_moe", "qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3_moe", "qwen3-235b-a22b", 235e9, 22.2e9),
    ],
)
def test_total_and_active_parameters_are_the_published_ones(
    family: str, preset: str, total: float, active: float
) -> None:
    result = find_family(family)
    dimensions = result.dimensions(result.preset(preset))
    assert dimensions.num_params == pytest.approx(total, rel=2e-3)
    assert dimensions.num_active_params == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_an_expert_group_hold_the_experts_once(seed: int) -> None:
    """Entries of a rank are those of the model without experts, and its share of the experts."""
    rng = Random(seed)
    ep = rng.choice([1, 2, 4, 8])
    mixture = MoeShape(ep * rng.randint(1, 4), 1, 16 * rng.randint(1, 5))
    layers = rng.randint(2, 5)
    dense = tuple(sorted(rng.sample(range(layers), rng.randint(0, layers - 1))))
    dimensions = Dimensions(100, 32, layers, 4, 2, 8, 48, mixture=mixture, dense_layers=dense)
    tp = rng.choice([1, 2])
    given = job(nodes=1, tp=tp, ep=ep, shard="none") if ep * tp <= 8 else job(nodes=2, tp=tp, ep=ep, shard="none")
    entries = replace(given, dimensions=dimensions).entries(0)
    experts = 3 * 32 * mixture.expert_size * mixture.num_experts * (layers - len(dense))
    assert entries.experts == experts // (ep * tp)
    whole = replace(job(nodes=2, ep=1, shard="none"), dimensions=dimensions).entries(0)
    assert whole.local == dimensions.num_params
    assert whole.experts == experts


def test_experts_are_summed_over_their_copies_alone() -> None:
    """Of 16 ranks, two hold the same experts with ep=8; the rest of the model has 16 copies."""
    alone, divided = job(shard="none"), job(shard="none", ep=8)
    entries = divided.entries(0)
    size = 4
    dense = 2 * 15 / 16 * (entries.local - entries.experts) * size
    assert sync_bytes(divided, 0)[0] == pytest.approx(dense + 2 * 1 / 2 * entries.experts * size)
    assert sync_bytes(alone, 0)[0] == pytest.approx(2 * 15 / 16 * alone.entries(0).local * size)


@pytest.mark.parametrize(("remat", "passes"), [("none", 4), ("full", 6)])
def test_rows_travel_to_their_experts_and_back_in_each_pass(remat: str, passes: int) -> None:
    result = job(ep=4, remat=remat, micro_batch=2)
    rows = 2 * 4096 * 8  # tokens of a micro-batch, and experts of a token
    sent = rows * 2048 * 2 * 3 / 4  # of four ranks a rank keeps the rows of its own experts
    assert sum(exchange_bytes(result, 48)) == pytest.approx(passes * 48 * sent)
    (traffic,) = (traffic for traffic in step_time(result).traffic if traffic.axis == "ep")
    assert traffic.bytes == pytest.approx(passes * 48 * sent * result.num_micro)
    assert exchange_bytes(job(), 48) == (0.0, 0.0)


def test_an_exchange_between_machines_takes_their_network() -> None:
    """Of 16 ranks on two machines, each sends 8 of 15 parts to the other machine."""
    result, links = job(ep=16), Links(device=1e9, network=4e9)
    assert exchange_s(result, 16, 15e9, links, spread=1) == pytest.approx(max(7e9 / 1e9, 8 * 8e9 / 4e9))
    assert exchange_s(result, 8, 7e9, links, spread=1) == pytest.approx(7.0)
    assert exchange_s(result, 8, 7e9, links, spread=2) == pytest.approx(max(3e9 / 1e9, 8 * 4e9 / 4e9))
    assert exchange_s(result, 16, 15e9, Links(1e9, 0.0), spread=1) == math.inf


def test_utilization_counts_the_experts_of_a_token() -> None:
    result = job()
    dimensions = result.dimensions
    matrices = dimensions.num_active_params - dimensions.vocab_size * dimensions.hidden_size
    attention = 3 * 48 * 2 * 32 * 128 * 4096
    assert model_flops_per_token(result) == pytest.approx(6 * matrices + attention, rel=1e-4)


def test_expert_parallelism_saves_memory_and_needs_ranks_that_share_state() -> None:
    whole, divided = rank_bytes(job(shard="none"))[1], rank_bytes(job(shard="none", ep=8))[1]
    assert divided.params < whole.params / 4
    reasons = [problem.reason for problem in impossible(job(ep=3, tp=2, shard="zero1"))]
    assert any("ep=3" in reason for reason in reasons)
    assert list(impossible(job(ep=8))) == []


def test_a_search_tries_expert_parallelism_on_models_with_experts_alone() -> None:
    result = job(nodes=1, global_batch=16)
    layouts = search(result.dimensions, result.machine, 1, result.config, Assumptions()).layouts
    assert {layout.job.config.parallel.ep for layout in layouts} >= {4, 8}
    dense = search(replace(result.dimensions, mixture=None), result.machine, 1, result.config, Assumptions())
    assert {layout.job.config.parallel.ep for layout in dense.layouts} == {1}


@pytest.mark.parametrize("ep", [1, 8])
def test_adapters_of_experts_are_counted_as_those_that_peft_makes(ep: int) -> None:
    """PEFT's matrices of 128 experts of Qwen3 30B-A3B, 48 blocks: A of 128 * r rows, B of 128 * r columns."""
    targets = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
    found = job(ep=ep, finetune={"method": "lora", "r": 4, "targets": targets})
    gate_up, down = 128 * 4 * (2048 + 2 * 768), 128 * 4 * (768 + 2048)
    attention = 4 * (2048 + 32 * 128)
    assert trained_params(found) == 48 * (gate_up + down + attention)
    assert found.trained(0, 1).local == 48 * ((gate_up + down) // ep + attention)
    # A token meets 8 of 128 experts.
    assert adapter_params(found) == (gate_up + down) * 8 // 128 + attention
    without = job(ep=ep, finetune={"method": "lora", "r": 4, "targets": targets[:1]})
    assert rank_bytes(found)[1].activations > rank_bytes(without)[1].activations
