"""A run in bf16 on a GPU without bf16 products gets one line; no other run looks at the GPU's capability."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cuda import CudaDiagnostics
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support.runs import run_plan, token_file

GPUS = {"Tesla V100-SXM2-16GB": (7, 0), "Tesla T4": (7, 5), "NVIDIA A100-SXM4-40GB": (8, 0), "NVIDIA B200": (10, 0)}


class _OnGpu(CpuBackend):
    """A CPU whose GPU is asked for its capability."""

    diagnostics = CudaDiagnostics(torch.device("cpu"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, gpu: str) -> list[torch.device]:
    """Reads of the capability of the GPU."""
    results: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        results.append(device)
        return GPUS[gpu]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    return results


@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("gpu", GPUS)
def test_only_a_run_in_bf16_asks_once_and_only_an_old_gpu_is_named(
    gpu: str, params: str, reads: list[torch.device], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 8)), "shuffle": False}
    precision = {"params": params, "update": "fp32_master" if params == "bf16" else "fp32"}
    resolved = run_plan(tmp_path / "run", data, steps=2, precision=precision)
    train_on(RunContext.open(_OnGpu(), resolved))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "compute capability" in line]
    assert len(reads) == (params == "bf16")
    assert len(warnings) == (params == "bf16" and GPUS[gpu] < (8, 0))
    for line in warnings:
        result = ".".join(map(str, GPUS[gpu]))
        assert line.startswith(f"warning: {gpu} has compute capability {result}, and products in bf16 need 8.0")
