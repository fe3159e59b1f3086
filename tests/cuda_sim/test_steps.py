"""Training steps on a pretended GPU: the host never waits, and kernels are the fused ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
BF16 = {"params": "bf16", "update": "fp32_master"}
TRAIN = {"seq_len": 256, "global_batch": 4, "micro_batch": 2}


def third_step(backend: Any, tables: Mapping[str, Mapping[str, Any]]) -> Record:
    """Record of the third step of a run, with the upload of its batch, and without the read of its loss."""
    from nxtrain.tools.trace.fake_rank import zero_batch
    from nxtrain.train.build import build_model, build_state, mesh_of
    from nxtrain.train.step import train_step
    from tests.support.models import plan

    sections: dict[str, dict[str, Any]] = {"model": {"config": SHAPE}, "precision": BF16, "train": TRAIN}
    for name, table in tables.items():
        sections[name] = {**sections.get(name, {}), **table}
    resolved = plan("gqa2", **sections)
    mesh = mesh_of(resolved, backend)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="zeros"), backend, mesh)
    for _ in range(2):
        train_step(state, zero_batch(resolved, state), 1e-3)
        backend.step_boundary()
    with recorded() as record:
        train_step(state, zero_batch(resolved, state), 1e-3)
        backend.step_boundary()
    return record


def step_alone(tables: Mapping[str, Mapping[str, Any]]) -> Record:
    with opened_gpu() as backend:
        return third_step(backend, tables)


def test_a_step_makes_the_host_wait_for_nothing_and_attends_by_flash_attention(gpu: SimulatedGpu) -> None:
    record = gpu.run(step_alone, {})
    assert record.host_waits == []
    assert record.of("malloc", "free", "pin") == []
    attention = [name for name in record.kernels if "flash_fwd" in name or "flash_bwd" in name]
    assert len(attention) >= 2 * 2 * 2  # micro-batches, blocks, and both ways
    assert [name for name in record.kernels if "softmax" in name.lower()] == []
