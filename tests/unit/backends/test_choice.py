"""Choice of the backend, and errors on a machine without its device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Support
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cuda import WORKSPACE, CudaBackend, CudaDiagnostics, deterministic
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.errors import BackendError
from tests.support.models import ALONE, random

NO_GPU = Support(False, "no GPU in this test")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "support", staticmethod(lambda: NO_GPU))


@pytest.fixture(autouse=True)
def no_neuron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NeuronBackend, "support", staticmethod(lambda: Support(False, "no chip\n    buy one")))
    monkeypatch.setattr(NeuronNativeBackend, "support", staticmethod(lambda: Support(False, "no beta\n    wait")))


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_cpu_where_nothing_else_runs_and_says_why() -> None:
    reasons = ("neuron-native: no beta", "neuron: no chip", "cuda: no GPU in this test", "cpu: every machine has a CPU")
    assert choose("auto", in_full=True) == ("cpu", "; ".join(reasons))
    short = "backend.name=auto: no accelerator can run here; recovery.debug=dist says why"
    assert choose("auto") == ("cpu", short), "one short line on a laptop"


def test_auto_takes_cuda_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "support", staticmethod(lambda: Support(True, "8 x H200")))
    assert choose("auto", in_full=True) == ("cuda", "neuron-native: no beta; neuron: no chip; cuda: 8 x H200")
    assert choose("auto") == ("cuda", "backend.name=auto: 8 x H200")


def test_a_name_is_taken_at_its_word() -> None:
    assert choose("xla") == ("xla", "backend.name=xla")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"there is no backend 'tpu'; known: cpu, cuda, xla, neuron, neuron-native"):
        open_backend("tpu")


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_refused_with_the_reason_and_exit_code_5() -> None:
    with pytest.raises(BackendError, match=r"backend\.name=cuda cannot run here: no GPU in this test") as refused:
        open_backend("cuda")
    assert refused.value.exit_code == 5


@pytest.mark.parametrize(
    ("built_with", "available", "reason"),
    [(None, False, "built without CUDA"), ("12.8", False, "no usable NVIDIA GPU or driver")],
)
def test_cuda_support_tells_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, built_with: str | None, available: bool, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    support = CudaBackend.support()
    assert not support.ok
    assert reason in support.reason


def test_a_local_rank_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "support", staticmethod(lambda: Support(True, "2 x H200")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=r"local rank 2 has no GPU: this node shows 2; start at most 2 ranks"):
        open_backend("cuda")


def test_deterministic_kernels_last_until_the_backend_closes_and_need_cublas_to_take_part() -> None:
    switches: Any = torch.utils.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    for value in (":4096:8", ":16:8"):
        with deterministic({WORKSPACE: value}):
            assert torch.are_deterministic_algorithms_enabled()
            assert not switches.fill_uninitialized_memory
        assert not torch.are_deterministic_algorithms_enabled()
        assert switches.fill_uninitialized_memory
    for environ, shown in (({}, "none"), ({WORKSPACE: ":0:0"}, ":0:0")):
        with pytest.raises(BackendError, match=rf"needs {WORKSPACE}=:4096:8, and the environment has {shown}"):
            deterministic(environ).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("device", "params", "precision", "peak"),
    [
        ("NVIDIA H100 PCIe", "bf16", "ieee", 756e12),
        ("NVIDIA H100 PCIe", "fp16", "tf32", 756e12),
        ("NVIDIA H100 PCIe", "fp32", "ieee", 51e12),
        ("NVIDIA H100 PCIe", "fp32", "tf32", 378e12),
        ("NVIDIA Z100", "bf16", "ieee", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_name_and_of_the_numbers_that_it_multiplies(
    monkeypatch: pytest.MonkeyPatch, device: str, params: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
    assert CudaDiagnostics(torch.device("cuda", 0)).peak_flops(params) == peak


def test_collectives_of_a_rank_alone_are_the_identity_and_copy_nothing() -> None:
    comm, x = C10dCollectives(1), random(4, 3)
    before = x.clone()
    assert comm.all_reduce(x, ALONE) is x
    assert comm.all_reduce(x, ALONE, "max") is x
    assert comm.all_gather(x, ALONE) is x
    assert comm.reduce_scatter(x, ALONE) is x
    assert comm.start_all_to_all(x, ALONE).wait() is x
    assert comm.start_all_reduce_bucket([x], ALONE, x.dtype, scale=0.5).wait()[0] is x
    comm.barrier()
    assert torch.equal(x, before)


def test_the_cpu_backend_reads_and_uploads_scalars_in_float32() -> None:
    backend = CpuBackend()
    lr, step = backend.scalars(0.1, 3.0)
    assert lr.shape == step.shape == ()
    assert lr.dtype == torch.float32
    assert backend.fetch({"lr": lr, "step": step}) == {"lr": torch.tensor(0.1).item(), "step": 3.0}
