"""Replacements of a backend's code are found in every form, so that a test that may make none can hold that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nxtrain.backends.neuron import attention, backend, hardware, sdk
from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from tests.support.neuron_runtime import replaced

PACKAGE = "nxtrain.backends"
NEURON = f"{PACKAGE}.neuron"


class _Other(XlaBackend):
    name = "neuron"


class _Kernels(XlaKernels):
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


CASES: dict[str, tuple[Any, str, Any, str]] = {
    "class": (backend, "NeuronBackend", _Other, f"{NEURON}.backend.NeuronBackend"),
    "method": (NeuronKernels, "attention", _Kernels.attention, f"{NEURON}.backend.NeuronKernels.attention"),
    "new method": (NeuronBackend, "put", XlaBackend.put, f"{NEURON}.backend.NeuronBackend.put"),
    "static method": (
        NeuronBackend,
        "support",
        staticmethod(sdk.distributed_support),
        f"{NEURON}.backend.NeuronBackend",
    ),
    "parent's method": (
        XlaBackend,
        "scalars",
        lambda self, *values: values,
        f"{PACKAGE}.xla.backend.XlaBackend.scalars",
    ),
    "function": (sdk, "detect", lambda: None, f"{NEURON}.sdk.detect"),
    "imported function": (backend, "choose", lambda *_: None, f"{NEURON}.backend.choose"),
    "constant": (attention, "SEQUENCE_TILE", 1024, f"{NEURON}.attention.SEQUENCE_TILE"),
    "path": (sdk, "DEVICES", Path("/elsewhere"), f"{NEURON}.sdk.DEVICES"),
    "default": (hardware.this_machine, "__defaults__", (Path("/elsewhere"),), f"{NEURON}.hardware.this_machine"),
}


def test_nothing_is_replaced_in_sound_modules() -> None:
    assert replaced(PACKAGE) == []


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_replaced_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value, at = CASES[case]
    monkeypatch.setattr(owner, name, value)
    found = replaced(PACKAGE)
    assert found
    assert all(each.startswith(at) for each in found), found
