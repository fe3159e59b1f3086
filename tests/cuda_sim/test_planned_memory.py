"""Peak of torch's allocator on a pretended GPU, next to what `nxtrain plan` says."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest

from nxtrain.plan.memory import Bytes, stage_bytes
from tests.cuda_sim.test_steps import started, step
from tests.support.cuda_sim import SimulatedGpu, opened_gpu, play
from tests.support.drawn import one_in
from tests.support.memory import TOLERANCE, job_of

TRAIN = {"seq_len": 2048, "global_batch": 4, "micro_batch": 2}
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "masters": {},
    "fp32": {"precision": {"params": "fp32", "update": "fp32"}},
    "stochastic": {"precision": {"params": "bf16", "update": "bf16_stochastic", "state": "bf16"}},
    "remat": {"train": {"remat": "full"}},
    "lora": {"finetune": {"method": "lora"}},
    "offload": {"parallel": {"offload": ["activations"]}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "sequence_parallel": True},
    "zero1": {"dp": 2, "shard": "zero1"},
    "full": {"dp": 2, "shard": "full"},
    "pp": {"pp": 2},
}


CAPACITY: dict[str, Any] = {
    "family": "mixtral",
    "moe_dispatch": "capacity",
    "moe_capacity_factor": 4.0,
    "config": {**SHAPE, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""Experts with rows for four times an even load."""


def peak(backend: Any, tables: Mapping[str, Mapping[str, Any]]) -> tuple[int, Bytes]:
    """Bytes of the allocator at the peak of a second step, and the plan of the stage, without memory of libraries."""
    import torch

    gc.collect()
    before = torch.cuda.memory_allocated()
    merged = {"model": {"config": SHAPE}, **tables}
    merged["train"] = {**TRAIN, **tables.get("train", {})}
    merged["parallel"] = {"dp": 1, **tables.get("parallel", {})}
    resolved, state = started(backend, merged)
    step(resolved, state)
    torch.cuda.reset_peak_memory_stats()
    step(resolved, state)
    planned = stage_bytes(job_of(resolved), state.mesh.pp.rank)
    return torch.cuda.max_memory_allocated() - before, planned._replace(workspace=0)


def peak_alone(tables: Mapping[str, Mapping[str, Any]]) -> tuple[int, Bytes]:
    with opened_gpu() as backend:
        return peak(backend, tables)


@pytest.mark.parametrize("name", one_in(2, OPTIONS))
def test_the_peak_of_a_step_is_the_planned_one(gpu: SimulatedGpu, name: str) -> None:
    result, planned = gpu.run(peak_alone, OPTIONS[name])
    assert result == pytest.approx(planned.total, rel=TOLERANCE)


def test_a_plan_without_a_kind_of_memory_is_seen(gpu: SimulatedGpu) -> None:
    result, planned = gpu.run(peak_alone, {})
    for kind in ("grads", "optimizer", "activations", "logits"):
        assert result != pytest.approx(planned._replace(**{kind: 0}).total, rel=TOLERANCE), kind


@pytest.mark.parametrize("name", one_in(2, LAYOUTS))
def test_the_peak_of_each_rank_is_the_planned_one(gpu: SimulatedGpu, name: str) -> None:
    for result, planned in gpu.run(play, 2, peak, {"parallel": LAYOUTS[name]}):
        assert result == pytest.approx(planned.total, rel=TOLERANCE)


def test_divided_experts_with_a_capacity_have_rows_for_all_of_it(gpu: SimulatedGpu) -> None:
    tables = {"model": CAPACITY, "parallel": {"dp": 2, "ep": 2}}
    for result, planned in gpu.run(play, 2, peak, tables):
        assert result == pytest.approx(planned.total, rel=TOLERANCE)
