"""Steps with `backend.deterministic` on a pretended GPU: every operation has a kernel that repeats its bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.cuda_sim.test_steps import third_step
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu

BACKWARD = "flash_bwd_dq_dk_dv"
DOCUMENTS: dict[str, dict[str, Any]] = {
    "data": {"doc_mask": True},
    "train": {"seq_len": 256, "global_batch": 2, "micro_batch": 2},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {},
    "fp32": {"precision": {"params": "fp32", "update": "fp32"}},
    "stochastic": {"precision": {"params": "bf16", "update": "bf16_stochastic", "state": "bf16"}},
    "documents": {"data": {"doc_mask": True}},
    "several chunks of the loss": {"train": {"loss_chunk_mib": 1}, "model": {"config": {"vocab_size": 4096}}},
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimulatedGpu]:
    """A process of its own: torch reads the variable of cuBLAS once."""
    opened = SimulatedGpu(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    yield opened
    opened.close()


def step(tables: Mapping[str, Mapping[str, Any]], deterministic: bool) -> Record:
    from nxtrain.backends.attention_choice import AttentionShape
    from nxtrain.backends.base import BackendSettings

    settings = BackendSettings(deterministic=deterministic)
    with opened_gpu(settings=settings) as backend:
        params = tables.get("precision", {}).get("params", "bf16")
        documents = tables.get("data", {}).get("doc_mask", False)
        backend.choose_attention("auto", AttentionShape(2, 256, 4, 64, params, documents=documents))
        return third_step(backend, tables)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_of_a_step_has_a_deterministic_kernel(gpu: SimulatedGpu, name: str) -> None:
    """torch raises an error where there is none."""
    record = gpu.run(step, CASES[name], True)
    assert record.host_waits == []


def test_flash_attention_adds_its_gradients_in_one_order(gpu: SimulatedGpu) -> None:
    results = {}
    for deterministic in (False, True):
        record = gpu.run(step, {}, deterministic)
        results[deterministic] = [kernel for kernel in record.of("kernel") if BACKWARD in kernel.fields["name"]]
    grids = {key: {kernel.fields["grid"] for kernel in kernels} for key, kernels in results.items()}
    assert len(results[False]) == len(results[True]) > 0
    assert grids[False] != grids[True], "as many blocks as the keys have, or as the GPU computes at once"
