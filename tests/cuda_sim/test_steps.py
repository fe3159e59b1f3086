"""Training steps on a pretended GPU: the host never waits, and kernels are the fused ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from nxtrain.backends.base import BackendSettings
from nxtrain.config.check import Resolved
from nxtrain.launch.gpu import RECORDING
from nxtrain.tools.trace.fake_rank import zero_batch
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.step import TrainState, train_step
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, play, recorded
from tests.support.models import plan

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
BF16 = {"params": "bf16", "update": "fp32_master"}
TRAIN = {"seq_len": 256, "global_batch": 4, "micro_batch": 2}


def started(backend: Any, tables: Mapping[str, Mapping[str, Any]]) -> tuple[Resolved, TrainState]:
    """A run of `SHAPE` before its first step; the tables override its configuration."""
    sections: dict[str, dict[str, Any]] = {"model": {"config": SHAPE}, "precision": BF16, "train": TRAIN}
    for name, table in tables.items():
        sections[name] = {**sections.get(name, {}), **table}
    resolved = plan("gqa2", **sections)
    mesh = mesh_of(resolved, backend)
    return resolved, build_state(resolved, build_model(resolved, backend, mesh, init="zeros"), backend, mesh)


def step(resolved: Resolved, state: TrainState) -> None:
    """A step, with the upload of its batch, and without the read of its loss."""
    train_step(state, zero_batch(resolved, state), 1e-3)
    state.backend.step_boundary()


def third_step(backend: Any, tables: Mapping[str, Mapping[str, Any]]) -> Record:
    """Record of the third step of a run."""
    resolved, state = started(backend, tables)
    for _ in range(2):
        step(resolved, state)
    with recorded() as record:
        step(resolved, state)
    return record


def step_alone(tables: Mapping[str, Mapping[str, Any]]) -> Record:
    """The same of a run of one rank."""
    compiles = tables.get("compile", {}).get("torch_compile", False)
    with opened_gpu(settings=BackendSettings(torch_compile=compiles)) as backend:
        return third_step(backend, tables)


OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {},
    "fp32": {"precision": {"params": "fp32", "update": "fp32"}},
    "fp16": {"precision": {"params": "fp16", "update": "fp32_master"}},
    "stochastic": {"precision": {"params": "bf16", "update": "bf16_stochastic", "state": "bf16"}},
    "kahan": {"precision": {"params": "bf16", "update": "bf16_kahan"}},
    "documents": {"data": {"doc_mask": True}},
    "window": {"model": {"family": "mistral", "config": {"sliding_window": 64}}},
    "qwen3": {"model": {"family": "qwen3"}},
    "selective": {"train": {"remat": "selective"}},
    "full": {"train": {"remat": "full"}},
    "z_loss": {"train": {"z_loss": 1e-4}},
    "muon": {"optim": {"name": "muon"}},
    "noise": {"metrics": {"noise_scale": True}},
    "lora": {"finetune": {"method": "lora", "dropout": 0.1}},
    "qlora": {"finetune": {"method": "qlora"}},
    "dpo": {"finetune": {"method": "lora", "objective": "dpo"}},
    "offload": {"parallel": {"offload": ["activations"]}},
    "compiled": {"compile": {"torch_compile": True}},
    "experts": {"model": {"family": "mixtral", "config": {"num_local_experts": 4}}},
    "capacity": {
        "model": {"family": "mixtral", "config": {"num_local_experts": 4}, "moe_dispatch": "capacity"},
        "precision": {"params": "fp32", "update": "fp32"},
    },
}
LAUNCHES = {
    "bf16": 686,
    "fp32": 568,
    "fp16": 712,
    "stochastic": 1346,
    "kahan": 761,
    "documents": 926,
    "window": 918,
    "qwen3": 974,
    "selective": 690,
    "full": 822,
    "z_loss": 709,
    "muon": 1446,
    "noise": 765,
    "lora": 1228,
    "qlora": 1276,
    "dpo": 1120,
    "offload": 698,
    "compiled": 426,
    "experts": 1247,
    "capacity": 1069,
}
"""Kernels of a step of two blocks and two micro-batches, as counted with torch 2.9.0."""

BLOCKED = ("documents", "window")  # attention that goes block by block
ROUTED = ("experts", "capacity")  # the only softmax is that of routers, forward and backward
BLOCKS_OF_A_STEP = 2 * 2  # of two micro-batches


@pytest.mark.parametrize("name", OPTIONS)
def test_no_step_makes_the_host_wait_or_takes_more_kernels(gpu: SimulatedGpu, name: str) -> None:
    record = gpu.run(step_alone, OPTIONS[name])
    assert record.host_waits == []
    assert record.of("malloc", "free", "pin") == []
    attention = [kernel for kernel in record.kernels if re.search("flash_(fwd|bwd)|fmha_cutlass[FB]", kernel)]
    assert bool(attention) == (name not in BLOCKED)
    softmax = [kernel for kernel in record.kernels if "softmax" in kernel.lower()]
    assert len(softmax) == (2 * BLOCKS_OF_A_STEP if name in ROUTED else 0)
    assert len(record.kernels) <= 1.05 * LAUNCHES[name]


def recording_after_a_step(backend: Any) -> tuple[float, dict[str, Any], bytes]:
    third_step(backend, {"parallel": {"tp": 2}})
    diagnostics = backend.diagnostics
    return backend.collectives.hang_timeout_s, diagnostics.queued(), diagnostics.recording()


def recordings() -> list[tuple[float, dict[str, Any], bytes]]:
    with patch.dict(os.environ, {RECORDING.name: RECORDING.value}):
        return play(2, recording_after_a_step)


def test_collectives_of_nccl_are_recorded_and_wait_longer_than_the_watchdog(gpu: SimulatedGpu) -> None:
    first, second = gpu.run(recordings)
    assert first[0] == second[0] == BackendSettings().hang_timeout_s + 120.0
    assert first[2] and second[2]
    assert [entry.number for entry in first[1].values()] == [entry.number for entry in second[1].values()]
    assert max(entry.number for entry in first[1].values()) > 10
