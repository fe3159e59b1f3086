"""Missing packages that the Neuron backend names, for folders as pip makes them of AWS's and of PyPI's packages."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxtrain.backends import choose, open_backend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.backend import NeuronBackend, NeuronDiagnostics, NeuronKernels
from nxtrain.backends.neuron.hardware import PRODUCT_NAME, this_machine
from nxtrain.backends.neuron.sdk import RELEASES, SdkVersion, detect, install_command
from nxtrain.backends.rounding import step_hash
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.optim.rounding import rounding_keys
from tests.support.adamw import host
from tests.support.models import random
from tests.unit.backends.conftest import Install

GOOD = {"torch": "2.9.0", "torch-neuronx": "2.9.0.2.12.22436", "neuronx-cc": "2.23.6484.0", "libneuronxla": "2.2.15515"}

# The text that stands in the metadata of the placeholders on PyPI, such as https://pypi.org/project/torch-neuronx.
WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository - pip.repos.neuron.amazonaws.com"


@pytest.fixture
def machine(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has nothing but what a test puts there."""
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(sdk, "DEVICES", tmp_path / "dev")
    return tmp_path


@pytest.fixture
def trainium(machine: Path, install: Install) -> Path:
    """A machine with two chips and Neuron SDK 2.28."""
    for name, version in GOOD.items():
        install(name, version)
    for number in (0, 1):
        (machine / "dev" / f"neuron{number}").touch()
    return machine


def test_a_machine_with_devices_and_packages_is_supported(trainium: Path) -> None:
    support = sdk.support()
    assert (support.ok, support.reason) == (True, "2 Neuron devices, SDK 2.28")
    name, reason = choose("auto", in_full=True)
    assert (name, reason.partition("; ")[2]) == ("neuron", "neuron: 2 Neuron devices, SDK 2.28")


@pytest.mark.usefixtures("machine")
def test_a_bare_machine_is_told_everything_that_it_lacks_and_what_to_type() -> None:
    support = NeuronBackend.support()
    assert not support.ok
    device, *packages, way_out = support.reason.split("\n    ")
    assert device.startswith("no Neuron device in ")
    assert packages == [f"{name} is not installed" for name in ("torch-neuronx", "neuronx-cc", "libneuronxla")]
    assert way_out == install_command()
    assert "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com " in way_out
    assert "'torch-neuronx==2.9.0.2.12.*' 'neuronx-cc==2.23.*'" in way_out


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch-neuronx", "1.0"), ("neuronx-cc", "1.0.post1"), ("libneuronxla", "1.0"), ("neuronx-distributed", "0.1")],
)
def test_a_placeholder_is_told_from_the_true_package(install: Install, name: str, version: str) -> None:
    install(name, version, WRONG)
    support = sdk.support()
    assert f"{name} {version} is PyPI's empty placeholder, not AWS's package" in support.reason.split("\n    ")
    assert install_command() in support.reason
    assert detect() is None


def test_true_distributed_packages_of_low_version_are_no_placeholders(trainium: Path, install: Install) -> None:
    install("neuronx_distributed", "0.17.26814", "NeuronX Distributed")
    assert sdk.support().ok


def test_without_a_device_only_the_device_is_missing(trainium: Path) -> None:
    for device in (trainium / "dev").iterdir():
        device.unlink()
    support = sdk.support()
    assert not support.ok
    assert support.reason.startswith("no Neuron device")
    assert "pip install" not in support.reason


@pytest.mark.parametrize(
    ("version", "sdk"),
    [
        ("2.9.0.2.11.19912", (2, 27)),
        ("2.9.0.2.12.22436", (2, 28)),
        ("2.9.0.2.13.26312", (2, 29)),
        ("2.9.0.2.14.27725", (2, 30)),
        ("2.9.0.2.15.32035", (2, 31)),
    ],
)
def test_the_release_is_read_from_the_version_of_torch_neuronx(
    install: Install, version: str, sdk: tuple[int, int]
) -> None:
    install("torch-neuronx", version)
    assert detect() == sdk
    assert SdkVersion(*sdk) in RELEASES


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"torch-neuronx": "2.12.0.3.0.1"}, "torch-neuronx 2.12.0.3.0.1 is of no known release of the SDK"),
        ({"torch": "2.13.0"}, "torch-neuronx 2.9.0.2.12.22436 needs torch 2.9, not 2.13.0"),
        ({"libneuronxla": "3.0.2891"}, "libneuronxla 3.0.2891 is for JAX; torch-neuronx needs 2.2"),
    ],
)
def test_versions_that_do_not_fit_are_named(install: Install, changed: dict[str, str], reason: str) -> None:
    for name, version in {**GOOD, **changed}.items():
        install(name, version)
    _, result, _ = sdk.support().reason.split("\n    ")
    assert result.startswith(reason)


@pytest.mark.usefixtures("machine")
def test_opening_it_on_a_bare_machine_is_refused_with_exit_code_5() -> None:
    with pytest.raises(BackendError, match=r"backend\.name=neuron cannot run here: no Neuron device in ") as refused:
        open_backend("neuron")
    assert refused.value.exit_code == 5


@pytest.mark.parametrize("name", ["xla", "neuron"])
@pytest.mark.parametrize("dead", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_a_dead_variable_is_refused_by_every_xla_device(
    trainium: Path, monkeypatch: pytest.MonkeyPatch, name: str, dead: str
) -> None:
    monkeypatch.setattr(XlaBackend, "support", staticmethod(sdk.support))
    monkeypatch.setenv(dead, "1")
    with pytest.raises(ConfigError, match=rf"{dead} \(environment\): 1 silently stores .*\n.*precision\.params=bf16"):
        open_backend(name)


@pytest.fixture
def no_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends and kernels that claim no device."""
    monkeypatch.setattr(XlaKernels, "__init__", lambda _: None)
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)


@pytest.mark.usefixtures("no_xla")
@pytest.mark.parametrize(("enabled", "rounds"), [("1", True), ("0", False), ("", False)])
def test_rounding_is_left_to_the_hardware_only_where_it_rounds(
    monkeypatch: pytest.MonkeyPatch, enabled: str, rounds: bool
) -> None:
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", enabled)
    kernels = NeuronBackend().kernels
    assert isinstance(kernels, NeuronKernels)
    assert kernels.rounds is rounds


@pytest.mark.usefixtures("no_xla")
@pytest.mark.parametrize(("rounds", "shared"), [(True, False), (True, True), (False, False), (False, True)])
def test_hardware_rounds_by_a_plain_cast_only_what_no_other_rank_rounds_too(
    monkeypatch: pytest.MonkeyPatch, rounds: bool, shared: bool
) -> None:
    """Shared parameters are rounded in software, with the CPU's bits, as are all if the hardware does not round.

    What a Trainium gets to round, `tests/xla/test_neuron_rounding.py` holds: one cast per tensor, and nothing else.
    """
    x = random(6, 4)
    table = ParamTable({"w": ShardSpec((6, 4), has_copy=shared)})
    key = rounding_keys(Layout(table, Mesh.build(1, 0)), {"w": x}, "param", 0, host)["w"]
    assert key.shared is shared
    wanted, out = torch.empty(2, 6, 4, dtype=torch.bfloat16)
    step = step_hash(torch.tensor(3.0))
    CpuKernels().stochastic_round(x.clone(), wanted, key, step)
    assert not torch.equal(wanted, x.to(torch.bfloat16)), "a cast is something else"
    monkeypatch.setattr(
        NeuronKernels, "_bitcasts", {t: _viewed(t) for t in (torch.int32, torch.float32)}, raising=False
    )
    NeuronKernels(rounds=rounds).stochastic_round(x, out, key, step)
    assert torch.equal(out, x.to(torch.bfloat16) if rounds and not shared else wanted)


def _viewed(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.view(dtype)


@pytest.mark.parametrize(("product", "peak"), [("trn1.32xlarge\n", 95e12), ("trn2u.48xlarge", 166.75e12), ("m5", None)])
def test_the_peak_of_a_core_is_found_by_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: str, peak: float | None
) -> None:
    path = tmp_path / PRODUCT_NAME
    path.parent.mkdir(parents=True)
    path.write_text(product, encoding="ascii")
    monkeypatch.setattr("nxtrain.backends.neuron.backend.this_machine", lambda: this_machine(tmp_path))
    assert NeuronDiagnostics().peak_flops() == peak
    assert this_machine(tmp_path / "none") is None


@pytest.fixture
def bare_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Neuron backend that claims no device."""
    pytest.importorskip("torch_xla", reason="no torch-xla: pip install 'nxtrain[xla]'")
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(XlaBackend, "fetch", lambda *_: {"loss": float("nan")})
    monkeypatch.setattr(XlaBackend, "step_boundary", lambda _: None)


@pytest.mark.usefixtures("bare_device")
@pytest.mark.parametrize(("variable", "extracts"), [("1", True), ("0", False), ("", False)])
def test_nothing_is_fetched_while_graphs_are_extracted(
    monkeypatch: pytest.MonkeyPatch, variable: str, extracts: bool
) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", variable)
    backend = open_backend("neuron")
    assert backend.extracts is extracts
    fetched = backend.fetch({"loss": torch.ones(())})["loss"]
    assert fetched == 1.0 if extracts else math.isnan(fetched)


def test_extraction_is_refused_where_it_would_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    with pytest.raises(BackendError, match=r"ONLY=1, .* backend\.name=cpu would train; unset it, or use"):
        open_backend("cpu")
