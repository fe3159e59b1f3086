"""A NeuronX Distributed that nxtrain is not verified with: refused, unless backend.allow_unverified asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends import choose_layers
from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Binding
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.neuron import backend as neuron
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.attention import choose
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.nxd.binding import NxdBinding
from nxtrain.backends.neuron.sdk import Package, SdkVersion
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.config.load import load
from nxtrain.launch import neuron as launching
from nxtrain.train import command
from nxtrain.train.context import RunContext
from tests.support import TINY
from tests.support.runs import run_plan, token_file

READ = Package("neuronx-distributed", "0.18.31415")
UNREAD = Package("neuronx-distributed", "0.19.1")
WHY = "neuronx-distributed 0.19.1 is not of 0.15 to 0.18, whose source nxtrain is verified with"
WARNING = f"warning: {WHY}; it is used all the same, as backend.allow_unverified=true asks"
SHAPE = AttentionShape(micro_batch=1, seq_len=4096, num_heads=4, head_size=128, params="bf16")
TRN1 = INSTANCES["trn1.32xlarge"]
SDK = SdkVersion(2, 29)

Use = Callable[[Package], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Pretend that a NeuronX Distributed is installed beside torch 2.9 and Neuron SDK 2.29."""

    def pretend(package: Package) -> None:
        packages = {package.name: package, "torch": Package("torch", "2.9.0")}
        monkeypatch.setattr(sdk, "installed", packages.get)
        monkeypatch.setattr(sdk, "detect", lambda: SDK)

    return pretend


def test_layers_of_it_are_taken_when_that_is_allowed(use: Use) -> None:
    use(UNREAD)
    assert choose_layers("auto", "neuron")[0] == "native"
    with pytest.raises(BackendError, match=r"0\.19\.1 is not of .* or use it with backend\.allow_unverified=true"):
        choose_layers("nxd", "neuron")
    for name in ("auto", "nxd"):
        chosen = choose_layers(name, "neuron", allow_unverified=True)
        assert chosen == ("nxd", "neuronx-distributed 0.19.1 is installed")


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({}, "is not installed"),
        ({UNREAD.name: Package(UNREAD.name, "0.19.1", placeholder=True)}, "placeholder"),
        ({UNREAD.name: UNREAD, "torch": Package("torch", "2.12.0")}, "is used with torch 2.9, not 2.12.0"),
    ],
)
def test_what_else_stands_against_it_still_does(
    packages: dict[str, Package], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "installed", packages.get)
    with pytest.raises(BackendError, match=reason):
        choose_layers("nxd", "neuron", allow_unverified=True)


def test_its_flash_attention_follows_the_same_rule() -> None:
    actual = choose("auto", SHAPE, TRN1, SDK, UNREAD)
    assert not actual.is_flash
    assert f"{WHY}: use a release of those, or backend.allow_unverified=true" in actual.reason
    with pytest.raises(ConfigError, match=r"flash cannot be had: .* is not of 0\.15 to 0\.18"):
        choose("flash", SHAPE, TRN1, SDK, UNREAD)
    for wanted in ("auto", "flash"):
        assert choose(wanted, SHAPE, TRN1, SDK, UNREAD, allow_unverified=True).is_flash
        assert choose(wanted, SHAPE, TRN1, SDK, READ).is_flash


@pytest.mark.parametrize(("package", "warned"), [(READ, ()), (UNREAD, (WARNING,))])
def test_the_neuron_backend_takes_its_kernel_with_a_warning(
    package: Package, warned: tuple[str, ...], use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(package)
    monkeypatch.setattr(XlaKernels, "__init__", lambda _: None)
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(neuron, "this_machine", lambda: TRN1)
    monkeypatch.setattr(neuron, "load", lambda: lambda *_, **__: None)
    backend = NeuronBackend()
    backend.choose_attention("auto", SHAPE)
    first, *others = backend.notes()
    assert (first.startswith("flash"), others) == (package is READ, [])
    backend.allow_unverified = True
    backend.choose_attention("auto", SHAPE)
    first, *others = backend.notes()
    assert (first.startswith("flash"), tuple(others)) == (True, warned)
    backend.choose_attention("plain", SHAPE)
    assert len(backend.notes()) == 1


def test_the_launcher_asks_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "installed", lambda _: UNREAD)
    monkeypatch.setattr(launching, "detect", lambda: SDK)
    flash = ["backend.attention=flash", "backend.name=neuron", "cluster.instance=trn1.32xlarge"]
    flash += ["model.preset=llama2-7b", "parallel.tp=8", "train.seq_len=4096", "train.global_batch=8"]
    flash += ["precision.params=bf16", "precision.update=fp32_master"]
    (problem,) = launching.needs(load(TINY, flash).config, {}, 8).problems
    assert (problem.key, WHY in problem.reason) == ("backend.attention", True)
    allowed = launching.needs(load(TINY, [*flash, "backend.allow_unverified=true"]).config, {}, 8)
    assert allowed.problems == ()


class _Told(CpuBackend):
    def notes(self) -> tuple[str, ...]:
        return sdk.unverified_notes()


class _Bound(Binding):
    name = "nxd"
    notes = NxdBinding.notes


@pytest.mark.parametrize(("package", "kind", "count"), [(READ, _Told, 0), (UNREAD, _Told, 1), (UNREAD, CpuBackend, 1)])
def test_a_run_with_it_prints_the_warning_once(
    package: Package, kind: type[CpuBackend], count: int, use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(package)
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 4)), "shuffle": False}
    backend = kind()
    backend.binding = _Bound()
    allowed: dict[str, Any] = {"allow_unverified": True}
    command.train_on(RunContext.open(backend, run_plan(tmp_path / "run", data, steps=1, backend=allowed)))
    said = capsys.readouterr().err
    assert " ".join(said.split()).count(WARNING) == count
