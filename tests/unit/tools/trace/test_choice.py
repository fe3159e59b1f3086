"""Layers and attention that `nxtrain graphs` traces of a run on its machine, and the lines about them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from nxtrain.backends.attention_choice import AttentionChoice
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import Package, SdkVersion
from nxtrain.backends.xla.environment import trace_environment
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.config.load import load
from nxtrain.launch import neuron
from nxtrain.tools.trace import choice
from nxtrain.tools.trace.choice import Choices, TracedReplacement, choose, without_nxd
from tests.support import TINY

TRN2 = "cluster.instance=trn2.48xlarge"
LLAMA2 = ("model.preset=llama2-7b", "train.seq_len=4096", "parallel.tp=8", "precision.params=bf16")
READ, UNREAD = (Package("neuronx-distributed", version) for version in ("0.18.31415", "0.19.1"))
PLACEHOLDER = Package("neuronx-distributed", "0.1", placeholder=True)
NAME = TracedReplacement("backend.name", "neuron", "neuron", "its device is not here, and graphs need none")
FLASH = "flash on trn2.48xlarge, by NKI's kernel of neuronx-distributed {}, Neuron SDK {}; only AWS's compiler can"


def chosen(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, here: Package | None = None, release: SdkVersion | None = None
) -> Choices:
    """The choices of a run on a machine that has a NeuronX Distributed, or none, and a Neuron SDK, or none."""
    packages = {"torch": Package("torch", "2.9.0"), "neuronx-distributed": here}
    for module in (sdk, choice):
        monkeypatch.setattr(module, "installed", packages.get)
        monkeypatch.setattr(module, "detect", lambda: release)
    monkeypatch.setattr(neuron, "this_machine", lambda: None)
    return choose(load(TINY, ["backend.name=neuron", TRN2, *overrides]).config)


def lines(result: Choices) -> list[str]:
    return [*map(str, result.stand_ins), *result.notes]


@pytest.mark.parametrize("configured", ["auto", "nxd"])
@pytest.mark.parametrize(
    ("here", "lacking"), [(None, "is not here"), (PLACEHOLDER, "is PyPI's empty placeholder here")]
)
def test_without_nxd_the_native_layers_stand_for_it(
    configured: str, here: Package | None, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = chosen(monkeypatch, f"backend.layers={configured}", here=here)
    reason = f"nxd on neuron where neuronx-distributed is installed; it {lacking}"
    assert result.layers == "native"
    assert result.stand_ins == (NAME, TracedReplacement("backend.layers", configured, "nxd", reason))
    auto = "auto: " if configured == "auto" else ""
    assert lines(result)[1] == f"traced with backend.layers=native in place of nxd ({auto}{reason})"


@pytest.mark.parametrize("configured", ["auto", "nxd"])
def test_where_nxd_is_installed_its_layers_are_traced(configured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = chosen(monkeypatch, f"backend.layers={configured}", here=READ)
    assert (result.layers, result.stand_ins) == ("nxd", (NAME,))
    assert result.notes[0] == "traced with the layers and the order of ranks of neuronx-distributed 0.18.31415"
    assert result.instance == INSTANCES["trn2.48xlarge"]


def test_native_layers_stand_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for here in (None, READ):
        result = chosen(monkeypatch, "backend.layers=native", "backend.attention=plain", here=here)
        assert (result.layers, lines(result)) == ("native", [str(NAME)])


def test_a_release_that_a_run_does_not_take_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is installed, nor where it would be, by its SDK."""
    for here, release in ((UNREAD, None), (None, SdkVersion(2, 30))):
        result = chosen(monkeypatch, here=here, release=release)
        assert (result.layers, result.stand_ins) == ("native", (NAME,))
        assert result.notes[0].startswith("backend.layers=auto is native on neuron: neuronx-distributed 0.19")
        with pytest.raises(BackendError, match=r"backend\.layers=nxd cannot run here: .* is not of 0\.15 to 0\.18"):
            chosen(monkeypatch, "backend.layers=nxd", here=here, release=release)
    allowed = chosen(monkeypatch, "backend.allow_unverified=true", here=UNREAD)
    assert allowed.layers == "nxd"
    assert allowed.notes[-1].startswith("warning: neuronx-distributed 0.19.1 is not of")
    assert not [note for note in chosen(monkeypatch, here=READ).notes if note.startswith("warning")]


@pytest.mark.parametrize("configured", ["auto", "flash"])
@pytest.mark.parametrize(("here", "version"), [(None, "0.17"), (READ, READ.version)])
def test_plain_attention_stands_for_flash(
    configured: str, here: Package | None, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = chosen(monkeypatch, *LLAMA2, f"backend.attention={configured}", here=here)
    (stand_in,) = (item for item in result.stand_ins if item.key == "backend.attention")
    assert (stand_in.configured, stand_in.run) == (configured, "flash")
    assert stand_in.reason.startswith(FLASH.format(version, "2.28"))
    assert str(stand_in).startswith("traced with backend.attention=plain in place of flash (")
    assert ("(auto: flash on" in str(stand_in)) is (configured == "auto")


def test_attention_that_a_run_computes_plainly_is_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    result = chosen(monkeypatch)
    assert not [stand_in for stand_in in result.stand_ins if stand_in.key == "backend.attention"]
    (note,) = (note for note in result.notes if "attention" in note)
    assert note.startswith("backend.attention=auto is plain on trn2.48xlarge: NKI's kernel multiplies in bf16")
    later = chosen(monkeypatch, *LLAMA2, release=SdkVersion(2, 31))
    assert any("the compiler of Neuron SDK 2.31 refuses NKI kernels" in note for note in later.notes)
    with pytest.raises(ConfigError, match="flash cannot be had: NKI's kernel multiplies in bf16"):
        chosen(monkeypatch, "backend.attention=flash")


def test_the_choices_are_those_of_the_functions_that_a_run_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose_layers", lambda *_, **__: ("native", "as this test says"))
    monkeypatch.setattr(choice, "attention_of", lambda *_: AttentionChoice("flash", "this test"))
    result = chosen(monkeypatch, here=READ)
    assert result.layers == "native"
    assert result.notes[0] == "backend.layers=auto is native on neuron: as this test says"
    assert result.stand_ins[1].reason.startswith("flash on trn2.48xlarge, by this test")


def test_an_automatic_backend_is_that_of_a_trainium(monkeypatch: pytest.MonkeyPatch) -> None:
    result = chosen(monkeypatch, "backend.name=auto", "cluster.instance=")
    assert result.instance == INSTANCES["trn1.32xlarge"]
    assert result.notes[0] == "trn1.32xlarge is assumed; cluster.instance names the instance of a run"
    name = (
        "traced with backend.name=xla in place of neuron (auto: neuron on a Trainium instance; its device is not here"
    )
    assert lines(result)[0].startswith(name)
    rounded = ("precision.params=bf16", "precision.update=bf16_stochastic")
    assert "stand for the hardware's rounding" in lines(chosen(monkeypatch, *rounded))[0]
    of_software = chosen(monkeypatch, *rounded, "backend.rounding=software")
    assert not [line for line in lines(of_software) if "the hardware's rounding" in line]
    of_hardware = lines(chosen(monkeypatch, *rounded, "backend.rounding=hardware"))
    (line,) = (line for line in of_hardware if "the hardware's rounding" in line)
    assert line.startswith("traced with backend.rounding=software in place of hardware (elementary operations stand")


def test_other_backends_have_our_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("xla", []), ("cpu", ["backend.name"]), ("neuron-native", ["backend.name"])):
        actual = chosen(monkeypatch, f"backend.name={name}", here=READ)
        assert (actual.layers, [stand_in.key for stand_in in actual.stand_ins], actual.notes) == (
            "native",
            expected,
            (),
        )
    actual = chosen(monkeypatch, "backend.name=cpu", "backend.layers=nxd", here=READ)
    assert (actual.layers, [stand_in.run for stand_in in actual.stand_ins]) == ("native", ["cpu", "nxd"])


def test_an_installed_nxd_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = chosen(monkeypatch, here=READ)
    config = load(TINY, ["backend.name=neuron"]).config
    without = without_nxd(result, config, "no libnrt.so")
    assert without.layers == "native"
    assert lines(without)[1] == "traced with backend.layers=native in place of nxd (auto: no libnrt.so)"
    assert not [note for note in without.notes if "traced with" in note]
    assert replace(without, layers="nxd", stand_ins=result.stand_ins, notes=result.notes) == result


def test_the_process_that_traces_has_the_ranks_of_a_machine_and_no_switch_of_nxd() -> None:
    given = {**os.environ, "NXD_CPU_MODE": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "NEURON_RT_X": "1"}
    result = trace_environment(given, local_world=32)
    assert (result["LOCAL_WORLD_SIZE"], result["NXD_LOG_LEVEL"]) == ("32", "warning")
    assert not {"NXD_CPU_MODE", "WORLD_SIZE", "NEURON_RT_X"} & set(result)
