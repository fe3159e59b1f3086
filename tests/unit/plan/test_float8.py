"""Predictions of runs in float8: time by the peaks of a machine, and memory beside traced steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.plan import memory
from nxtrain.plan.float8 import casts, float8_params
from nxtrain.plan.job import Job
from nxtrain.plan.speed import SPEEDS, step_time
from nxtrain.plan.work import passes
from nxtrain.tools.trace.fake_rank import trace_rank
from tests.support.models import changed, plan
from tests.support.published import job_of
from tests.unit.plan.test_work import MATRICES, ROW, TOKENS


def job(recipe: str, **changes: object) -> Job:
    found = job_of({**ROW, **changes})
    precision = found.config.precision.model_copy(update={"fp8": recipe})
    return replace(found, config=found.config.model_copy(update={"precision": precision}))


def test_products_of_layers_take_the_time_of_their_own_peak() -> None:
    plain, narrow = (passes(job(recipe), range(2), has_head=True) for recipe in ("none", "rowwise"))
    assert float8_params(job("rowwise")) == MATRICES
    for before, after, times in zip(plain, narrow, (1, 2), strict=True):
        assert (after.products, after.attention) == (before.products, before.attention)
        assert after.float8 == times * 2 * 2 * MATRICES * TOKENS
        assert after.moved > before.moved
    moved = sum(casts(job("rowwise")))
    entries = TOKENS * (4096 + 4096 + 4096 + 14336) + MATRICES, TOKENS * (6144 + 4096 + 2 * 14336 + 4096)
    assert moved == 3 * (2 * entries[0] + 2 * entries[1])


def test_a_machine_without_a_known_peak_has_the_time_of_bf16_and_says_so() -> None:
    times = {recipe: step_time(job(recipe)) for recipe in ("none", "tensorwise")}
    assert times["tensorwise"].step_s < 0.9 * times["none"].step_s
    assert "which was compared with no run" in times["tensorwise"].basis
    assert times["none"].basis == SPEEDS["hopper"].basis
    unknown = replace(job("tensorwise"), machine=replace(MACHINES["p5.48xlarge"], float8_flops=0.0))
    found = step_time(unknown)
    assert found.step_s >= times["none"].step_s
    assert "no peak of p5.48xlarge in float8 is known" in found.basis


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize(("remat", "tp", "fused"), [("none", 1, True), ("selective", 2, False), ("full", 2, True)])
def test_memory_is_within_a_tenth_of_a_traced_step(recipe: str, remat: str, tp: int, fused: bool) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    resolved = plan(
        "mha",
        model={"config": {**shape, "num_hidden_layers": 3, "vocab_size": 512}, "fused_gate_up": fused},
        parallel={"tp": tp, "dp": 2, "sequence_parallel": tp > 1},
        precision={"params": "bf16", "update": "fp32_master"},
        train={"seq_len": 1024, "micro_batch": 2, "global_batch": 8, "remat": remat, "loss_chunk_mib": 1},
    )
    resolved = changed(resolved, precision={"fp8": recipe})
    predicted = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    predicted.__dict__["attention"] = "fused"
    traced = trace_rank(resolved, predicted.world, 0, 8, "fused")
    found = memory.stage_bytes(predicted, 0)
    assert found.total - found.workspace == pytest.approx(traced.total, rel=0.1)
