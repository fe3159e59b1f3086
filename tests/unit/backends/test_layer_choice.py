"""Choice of parallel layers, and errors where they are missing; no NeuronX Distributed is needed."""

from __future__ import annotations

import pytest

from nxtrain.backends import choose_layers
from nxtrain.backends.base import Backend, Binding
from nxtrain.backends.neuron.nxd import binding
from nxtrain.common.errors import BackendError
from nxtrain.config.load import load
from tests.support import TINY
from tests.unit.backends.conftest import Install

INDEX = "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com"
TO_INSTALL = f"{INDEX} 'neuronx-distributed==0.17.*'"
UNVERIFIED = (
    "neuronx-distributed {} is not of 0.15 to 0.18, whose source nxtrain is verified with; "
    f"{TO_INSTALL}, or use it with backend.allow_unverified=true"
)


@pytest.mark.parametrize("version", ["0.15.22259", "0.17.26814", "0.18.0"])
def test_auto_takes_a_known_release_on_neuron_devices_alone(install: Install, version: str) -> None:
    install("torch", "2.9.0")
    install("neuronx-distributed", version)
    assert choose_layers("auto", "neuron") == ("nxd", f"neuronx-distributed {version} is installed")
    assert choose_layers("nxd", "neuron")[0] == "nxd"
    assert choose_layers("native", "neuron") == ("native", "backend.layers=native")
    for backend in ("cpu", "cuda", "xla", "neuron-native"):
        assert choose_layers("auto", backend) == ("native", "")


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ([], f"neuronx-distributed is not installed; {TO_INSTALL}"),
        (
            [("neuronx-distributed", "0.1", "WRONG PACKAGE. Please install")],
            f"neuronx-distributed 0.1 is PyPI's empty placeholder, not AWS's package; {TO_INSTALL}",
        ),
        *(
            ([("neuronx-distributed", version)], UNVERIFIED.format(version))
            for version in ("0.14.1", "0.20.0", "1.15.0")
        ),
        ([("neuronx-distributed", "next")], UNVERIFIED.format("next")),
        ([("neuronx-distributed", "0.19.1")], UNVERIFIED.format("0.19.1")),
        (
            [("neuronx-distributed", "0.19.1"), ("torch-neuronx", "2.9.0.2.14.1")],
            "neuronx-distributed 0.19.1 is not of 0.15 to 0.18, whose source nxtrain is verified with; Neuron SDK 2.30 "
            f"has 0.19 alone, which is not verified: install Neuron SDK 2.28: {INDEX} torch==2.9.0 torch-xla==2.9.0 "
            "'torch-neuronx==2.9.0.2.12.*' 'neuronx-cc==2.23.*' 'neuronx-distributed==0.17.*', or use it with "
            "backend.allow_unverified=true",
        ),
        (
            [("neuronx-distributed", "0.17.1"), ("torch", "2.8.0")],
            "neuronx-distributed 0.17.1 is used with torch 2.9, not 2.8.0",
        ),
        (
            [("torch-neuronx", "2.9.0.2.13.1")],
            f"neuronx-distributed is not installed; {INDEX} 'neuronx-distributed==0.18.*'",
        ),
    ],
)
def test_what_is_missing_is_said_with_the_way_out(
    install: Install, packages: list[tuple[str, ...]], reason: str
) -> None:
    for package in packages:
        install(*package)
    assert choose_layers("auto", "neuron") == ("native", reason)
    with pytest.raises(BackendError) as refused:
        choose_layers("nxd", "neuron")
    assert str(refused.value) == f"backend.layers=nxd cannot run here: {reason}; or use backend.layers=native"
    assert refused.value.exit_code == 5


def test_on_a_cpu_its_own_switch_allows_it_when_asked(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch", "2.9.0")
    install("neuronx-distributed", "0.18.0")
    with pytest.raises(BackendError, match="not on cpu"):
        choose_layers("nxd", "cpu")
    monkeypatch.setenv("NXD_CPU_MODE", "1")
    assert choose_layers("nxd", "cpu")[0] == "nxd"
    assert choose_layers("auto", "cpu") == ("native", "")


def test_without_a_library_a_backend_has_the_binding_that_changes_nothing() -> None:
    assert type(Backend.binding) is Binding
    assert Backend.binding.rank_order(tp=8, pp=4) == ()


@pytest.mark.parametrize(
    ("missing", "way_out"),
    [("boto3", "pip install boto3"), ("transformers.utils.fx", "pip install 'transformers==4.51.*'")],
)
def test_a_package_that_does_not_import_is_told_with_what_it_lacks(missing: str, way_out: str) -> None:
    said = binding._import_failure(ModuleNotFoundError(f"No module named {missing!r}", name=missing))
    assert f"neuronx-distributed cannot be imported: No module named {missing!r}" in said
    assert way_out in said


@pytest.mark.parametrize(
    ("override", "why"), [("finetune.method=lora", "finetune.method=lora"), ("parallel.cp=2", "parallel.cp=2")]
)
def test_layers_that_only_we_have_are_ours_even_where_the_others_would_be_taken(override: str, why: str) -> None:
    config = load(TINY, [override]).config
    name, reason = choose_layers("auto", "neuron", needs_own=config.needs_own_layers)
    assert name == "native"
    assert why in reason
    assert load(TINY, []).config.needs_own_layers == ""
