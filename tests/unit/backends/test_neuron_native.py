"""Requirements of TorchNeuron, errors for missing ones, and the calls of its backend to torch, on a fake device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend, BackendSettings, Support
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cuda import CudaBackend
from nxtrain.backends.neuron import native, native_diagnostics, sdk, torchneuron
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.backends.neuron.native_diagnostics import NeuronNativeDiagnostics
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.sdk import Package
from nxtrain.backends.xla.backend import XlaBackend
from nxtrain.common.distributed import rendezvous
from nxtrain.common.errors import BackendError
from nxtrain.common.machines import Machine

GOOD = {"torch": "2.14.0", "torch-neuronx": "2.14.3.0.1301", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}
READY = (
    "16 Neuron devices, TorchNeuron 2.14.3.0.1301, neuronx-cc 2.28.7631.0, nki 0.7.0, driver 2.31.7.0, runtime 2.35.30"
)
OTHER = "use backend.name=neuron"


@pytest.fixture
def trn2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A trn2.48xlarge with 16 chips, whose packages the test may change."""
    packages = dict(GOOD)
    for number in range(16):
        (tmp_path / f"neuron{number}").touch()
    monkeypatch.setattr(sdk, "DEVICES", tmp_path)
    for module in (sdk, torchneuron):
        monkeypatch.setattr(module, "installed", lambda name: _package(packages, name))
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(shutil, "which", {"neuronx-cc": "/venv/bin/neuronx-cc"}.get)
    (tmp_path / "libnrt.so.1").touch()
    (tmp_path / "libnrt.so.2.35.30").touch()
    (tmp_path / "version").write_text("2.31.7.0\n", encoding="ascii")
    monkeypatch.setattr(torchneuron, "RUNTIME_FOLDER", tmp_path)
    monkeypatch.setattr(torchneuron, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torchneuron, "OS_RELEASE", tmp_path / "os-release")
    monkeypatch.setattr(torch, "neuron", object(), raising=False)
    _be(monkeypatch, INSTANCES["trn2.48xlarge"])
    yield packages


def _package(packages: dict[str, str], name: str) -> Package | None:
    version = packages.get(name)
    return Package(name, version, placeholder=version == "1.0") if version else None


def _be(monkeypatch: pytest.MonkeyPatch, instance: Machine | None) -> None:
    for module in (torchneuron, native_diagnostics):
        monkeypatch.setattr(module, "this_machine", lambda: instance)


def lines(support: Support) -> list[str]:
    assert not support.ok
    return support.reason.split("\n    ")


def test_a_trn2_with_torchneuron_is_supported(trn2: dict[str, str]) -> None:
    support = NeuronNativeBackend.support()
    assert (support.ok, support.reason) == (True, READY)
    assert torchneuron.detect() == (2, 33)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"torch-neuronx": ""}, "TorchNeuron is not installed"),
        ({"torch-neuronx": "1.0"}, "torch-neuronx 1.0 is PyPI's empty placeholder, not AWS's package"),
        (
            {"torch-neuronx": "2.9.0.2.12.22436"},
            "torch-neuronx 2.9.0.2.12.22436 is the one for PyTorch/XLA, not TorchNeuron",
        ),
        ({"torch": "2.13.0"}, "torch-neuronx 2.14.3.0.1301 needs torch 2.14, not 2.13.0"),
        ({"neuronx-cc": ""}, "neuronx-cc is not installed"),
        (
            {"neuronx-cc": "2.27.2878.0"},
            "neuronx-cc 2.27.2878.0 is too old: TorchNeuron of Neuron SDK 2.33 needs 2.28",
        ),
        ({"nki": "0.6.1"}, "nki 0.6.1 is too old: TorchNeuron of Neuron SDK 2.33 needs 0.7"),
    ],
)
def test_a_package_that_does_not_fit_is_named(trn2: dict[str, str], changed: dict[str, str], first: str) -> None:
    trn2.update(changed)
    result, *_, command, other = lines(NeuronNativeBackend.support())
    assert result == first
    assert command == torchneuron.install_advice()
    assert OTHER in other


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("version", "2.30.2.0", "driver 2.30.2.0 is too old: TorchNeuron of Neuron SDK 2.33 needs 2.31"),
        ("libnrt.so.2.34.10", "", "runtime 2.34.10 is too old: TorchNeuron of Neuron SDK 2.33 needs 2.35"),
    ],
)
def test_an_old_driver_and_an_old_runtime_are_named(
    trn2: dict[str, str], tmp_path: Path, file: str, text: str, wrong: str
) -> None:
    (tmp_path / "libnrt.so.2.35.30").unlink()
    (tmp_path / file).write_text(text, encoding="ascii")
    assert lines(NeuronNativeBackend.support())[0] == wrong


def test_a_compiler_outside_of_path_is_named(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert lines(NeuronNativeBackend.support())[0].startswith("neuronx-cc is not on PATH")


def test_driver_and_runtime_of_unknown_version_are_no_obstacle(
    trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RUNTIME_FOLDER", "DRIVER_FILE"):
        monkeypatch.setattr(torchneuron, name, tmp_path / "none")
    reason = NeuronNativeBackend.support().reason
    assert reason.endswith("driver of unknown version, runtime of unknown version")
    trn2["nrtpy"] = "2.35.30"  # the runtime as a package
    assert NeuronNativeBackend.support().reason.endswith("runtime 2.35.30")


@pytest.mark.parametrize(
    ("system", "says", "lacks"),
    [
        ('ID=ubuntu\nVERSION_ID="26.04"', ["apt-get install aws-neuronx-dkms", torchneuron.pip_command()], "image"),
        ('ID=ubuntu\nVERSION_ID="24.04"', [torchneuron.IMAGE, torchneuron.IMAGE_ENVIRONMENT, "container"], "pip"),
        ('ID=ubuntu\nVERSION_ID="22.04"', ["not for ubuntu 22.04", "from source", torchneuron.IMAGE], "pip"),
        ('ID="amzn"\nVERSION_ID="2023"', ["not for amzn 2023", torchneuron.IMAGE], "source"),
        ("", ["not for this system", torchneuron.IMAGE], "source"),
    ],
)
def test_the_advice_is_for_the_operating_system(tmp_path: Path, system: str, says: list[str], lacks: str) -> None:
    (tmp_path / "os-release").write_text(system + "\n", encoding="utf-8")
    advice = torchneuron.install_advice(tmp_path / "os-release")
    assert all(line in advice for line in says)
    assert lacks not in advice


def test_an_old_torch_and_an_old_python_are_named(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    trn2.update({"torch": "2.9.0+cu128", "torch-neuronx": "2.9.0.2.12.22436"})
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    _, *result, _, _ = lines(NeuronNativeBackend.support())
    assert result == [
        "torch 2.9.0+cu128 is too old: TorchNeuron is made for torch 2.13 and 2.14",
        "Python 3.11 is too old: TorchNeuron has packages for 3.12 and newer",
    ]


def test_compilation_alone_needs_no_device_and_no_driver(
    trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sdk, "DEVICES", tmp_path / "none")
    (tmp_path / "version").write_text("2.30.2.0", encoding="ascii")
    assert not NeuronNativeBackend.support().ok
    monkeypatch.setenv(torchneuron.COMPILE_ONLY, "1")
    support = NeuronNativeBackend.support()
    assert support.ok
    assert support.reason == READY.replace("16 Neuron devices", "compilation without a device").replace(
        "driver 2.31.7.0, ", ""
    )
    trn2["neuronx-cc"] = ""
    assert lines(NeuronNativeBackend.support())[0] == "neuronx-cc is not installed"


def test_trn1_is_sent_to_the_other_backend(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _be(monkeypatch, INSTANCES["trn1.32xlarge"])
    assert lines(NeuronNativeBackend.support()) == [
        "trn1.32xlarge has chips of the first generation: TorchNeuron is for Trn2 and Trn3 only",
        torchneuron.ELSEWHERE,
    ]


def test_a_machine_without_chips_is_told_so(
    trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sdk, "DEVICES", tmp_path / "none")
    assert lines(NeuronNativeBackend.support())[0].startswith("no Neuron device in ")


def test_a_torch_that_did_not_load_it_is_told_apart(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "neuron")
    reason, other = lines(NeuronNativeBackend.support())
    assert f"torch {torch.__version__} has no device 'neuron'" in reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in reason
    assert OTHER in other


def test_auto_takes_the_one_of_the_two_that_is_installed(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, reason = choose("auto", in_full=True)
    assert name == "neuron-native"
    assert reason == f"neuron-native: {READY}"
    trn2.update({"torch": "2.9.0", "torch-neuronx": "2.9.0.2.12.22436"})
    trn2.update({"neuronx-cc": "2.23.6484.0", "libneuronxla": "2.2.15515"})
    name, reason = choose("auto", in_full=True)
    assert name == "neuron"
    assert reason.endswith("; neuron: 16 Neuron devices, SDK 2.28")


def test_the_other_backend_knows_torchneuron_when_it_sees_it(trn2: dict[str, str]) -> None:
    assert "torch-neuronx 2.14.3.0.1301 is TorchNeuron, which has no PyTorch/XLA: use backend.name=neuron-native" in (
        lines(sdk.support())
    )


def test_opening_it_here_is_refused_with_exit_code_5() -> None:
    with pytest.raises(BackendError, match=r"backend\.name=neuron-native cannot run here: \w+") as refused:
        open_backend("neuron-native")
    assert refused.value.exit_code == 5


@pytest.fixture
def torch_calls(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of rank 3 of 64 to torch, in order."""
    calls: list[Any] = []
    placement = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "64"}
    for name, value in placement.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "DEVICE", "cpu")  # torch parses no device "neuron" without a backend for it
    store = dist.HashStore()
    store.add("nxtrain/met", 63)  # the others, of whom there is none to meet
    monkeypatch.setattr(rendezvous, "connect", lambda *_: store)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda name, **how: calls.append(("join", name, how)))
    monkeypatch.setattr(dist, "new_group", lambda **how: calls.append(("group", how)))
    monkeypatch.setattr(torch, "device", lambda *args: calls.append(("device", *args)))
    return calls


def test_a_rank_joins_before_it_touches_the_device(torch_calls: list[Any]) -> None:
    """AWS's process group gives a process its core, and refuses one whose runtime has started."""
    backend = NeuronNativeBackend(BackendSettings(hang_timeout_s=90.0))
    (join, name, how), (group, host), device = torch_calls
    # Another rank may compile for longer than it may hang, and the others wait for it in a collective.
    assert (join, name, how["device_id"], how["timeout"].total_seconds()) == ("join", "neuron", None, 360.0)
    assert (how["rank"], how["world_size"], how["store"].timeout.total_seconds()) == (3, 64, 90.0)
    assert (group, host["backend"], host["timeout"].total_seconds()) == ("group", "gloo", 360.0)
    assert device == ("device", "cpu")
    assert (backend.rank, backend.world, backend.local_rank, backend.local_world) == (3, 64, 3, 64)
    assert type(backend.kernels) is NeuronNativeKernels
    assert native.DEVICE == "cpu"


def test_the_peak_is_that_of_a_logical_core(trn2: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert NeuronNativeDiagnostics().peak_flops() == 667e12 / 4
    _be(monkeypatch, None)
    assert NeuronNativeDiagnostics().peak_flops() is None


def test_memory_is_read_after_the_device_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    documented = SimpleNamespace(
        synchronize=lambda: calls.append("synchronize"), max_memory_allocated=lambda: len(calls)
    )
    monkeypatch.setattr(torch, "neuron", documented, raising=False)
    assert NeuronNativeDiagnostics().peak_memory_bytes() == 1


@pytest.mark.parametrize(
    ("backend", "compiles"), [(NeuronNativeBackend, True), (XlaBackend, True), (CpuBackend, False)]
)
def test_accelerators_compile_at_first_use(backend: type[Backend], compiles: bool) -> None:
    assert backend.compiles_at_first_use is compiles


def test_inductor_makes_any_device_compile_at_first_use() -> None:
    backend = CpuBackend(BackendSettings(hang_timeout_s=90.0, torch_compile=True))
    assert backend.compiles_at_first_use
    assert backend.collectives.hang_timeout_s == 360.0
    assert backend.collectives.limit == "360 seconds, 4 x recovery.hang_timeout_s since graphs compile at first use"
    assert CpuBackend(BackendSettings(hang_timeout_s=90.0)).collectives.hang_timeout_s == 90.0


@pytest.mark.parametrize(
    ("backend", "compiler"), [(CpuBackend, "inductor"), (CudaBackend, "inductor"), (NeuronNativeBackend, "neuron")]
)
def test_each_device_has_its_compiler(backend: type[Backend], compiler: str) -> None:
    assert backend.compiler == compiler


STEP = """
import sys, torch
from tests.support import fake_neuron
fake_neuron.install()
from nxtrain.backends import open_backend
from nxtrain.common.mesh import Mesh
from nxtrain.train.build import build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step
from tests.support.models import plan, tokens
resolved, backend, mesh = plan("gqa2"), open_backend("neuron-native"), Mesh.build(1, 0)
state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
rows = tokens(resolved, 2)[None]
train_step(state, DeviceBatch.of(rows[..., :-1], rows[..., 1:], backend.put), 1e-3)
vendors = {"torch_xla", "torch_neuronx", "neuronx_distributed", "neuronxcc", "libneuronxla"}
sys.exit(" ".join(sorted(vendors & sys.modules.keys())) or 0)
"""


def test_a_step_imports_nothing_of_xla_or_nxd() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
