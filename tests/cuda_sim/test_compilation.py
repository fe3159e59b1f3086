"""Compiled blocks on pretended GPUs of several architectures: Triton and ptxas build every kernel."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends.base import BackendSettings
from nxtrain.tools.trace.fake_rank import zero_batch
from tests.cuda_sim.test_steps import SHAPE, started
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

NAMES = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}


def block_pass() -> Record:
    """Record of a pass through a model of one compiled block, forward and backward."""
    with opened_gpu(settings=BackendSettings(torch_compile=True)) as backend, recorded() as record:
        tables: dict[str, dict[str, Any]] = {
            "compile": {"torch_compile": True},
            "model": {"config": {**SHAPE, "num_hidden_layers": 1}},
        }
        resolved, state = started(backend, tables)
        batch = zero_batch(resolved, state)
        state.lm.loss(batch.inputs[0], batch.targets[0]).backward()
    return record


@pytest.mark.parametrize("architecture", [100, *(pytest.param(number, marks=pytest.mark.slow) for number in (80, 90))])
def test_kernels_of_a_compiled_block_are_built_for_the_architecture(tmp_path: Path, architecture: int) -> None:
    caches = {f"{name}_CACHE_DIR": str(tmp_path / name) for name in ("TORCHINDUCTOR", "TRITON")}
    device = {"CUDA_SIM_CAPABILITY": str(architecture), "CUDA_SIM_NAME": NAMES[architecture]}
    with closing(SimulatedGpu(**caches, **device)) as gpu:
        record = gpu.run(block_pass)
    launched = {kernel for kernel in record.kernels if kernel.startswith("triton_")}
    built = {}
    for file in tmp_path.rglob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if "target" in content:
            built[content["name"]] = content["target"]["arch"]
            assert file.with_suffix(".cubin").stat().st_size > 0
    assert launched
    assert launched <= built.keys()
    assert set(built.values()) == {architecture}
