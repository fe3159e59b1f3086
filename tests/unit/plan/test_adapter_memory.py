"""Predicted memory of LoRA and QLoRA against training steps of this CPU, whose tensors are counted."""

from __future__ import annotations

from typing import Any

import pytest

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.machines import MACHINES
from nxtrain.plan.job import Job
from nxtrain.plan.memory import stage_bytes
from nxtrain.tools.trace.fake_rank import step_memory
from nxtrain.train.build import mesh_of
from tests.support.models import plan

SHAPE: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
"""A sequence of 1,024 tokens takes fused attention, which keeps no probabilities."""


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_step_takes_the_predicted_memory(method: str, remat: str, dropout: float) -> None:
    resolved = plan(
        "mha",
        model={"config": SHAPE},
        parallel={"dp": 1},
        precision={"params": "bf16", "update": "fp32_master"},
        train={"seq_len": 1024, "micro_batch": 2, "global_batch": 4, "remat": remat, "loss_chunk_mib": 1},
        finetune={"method": method, "r": 8, "dropout": dropout},
        backend={"name": "cpu"},
    )
    backend = CpuBackend()
    found = step_memory(resolved, backend, mesh_of(resolved, backend))
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    predicted = stage_bytes(job, 0)
    assert (found.params, found.optimizer) == (predicted.params, predicted.optimizer)
    # The plan takes whole groups of scales for each matrix on average.
    assert found.frozen == pytest.approx(predicted.frozen, rel=1e-3)
    assert predicted.total - predicted.workspace == pytest.approx(found.total, rel=0.1)
