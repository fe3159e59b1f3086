"""Kernels and autograd functions leave their inputs as they are on an XLA device, as on every other."""

from __future__ import annotations

from pathlib import Path

from nxtrain.backends.base import Backend
from tests.support.contract_layers import hold_collectives, hold_functions, hold_layers, hold_xla_kernels
from tests.support.xla_engine import run_devices

SEED = 0
DRAWS = 2
FUNCTIONS = (
    "_SwiGLU",
    "_Rotate",
    "_RMSNorm",
    "SavingProduct",
    "_SplitProduct",
    "_ReduceGradient",
    "_VocabCrossEntropy",
)


def hold_rest(backend: Backend, seed: int, draws: int) -> None:
    hold_layers(backend, seed, draws)
    hold_collectives(backend, seed)


def test_kernels_keep_what_they_are_given(tmp_path: Path) -> None:
    run_devices(1, hold_xla_kernels, SEED, DRAWS, folder=tmp_path)


def test_autograd_functions_keep_what_they_are_given(tmp_path: Path) -> None:
    run_devices(1, hold_functions, FUNCTIONS, SEED, DRAWS, folder=tmp_path)


def test_layers_and_collectives_keep_what_they_are_given(tmp_path: Path) -> None:
    run_devices(1, hold_rest, SEED, DRAWS, folder=tmp_path)
