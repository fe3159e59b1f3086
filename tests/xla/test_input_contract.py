"""Kernels and autograd functions leave their inputs as they are on an XLA device, as on every other.

`tests/unit/test_input_contract.py` has the contract; there every draw is held on the host.
"""

from __future__ import annotations

from pathlib import Path

from nxtrain.backends.base import Backend
from tests.support.contract_bodies import hold_collectives, hold_functions, hold_layers, hold_xla_kernels
from tests.support.xla_engine import run_devices

SEED = 0
DRAWS = 3
FUNCTIONS = ("_SwiGLU", "_Rotate", "_RMSNorm", "_Product", "_SplitProduct", "_ReduceGradient", "_VocabCrossEntropy")


def hold_all(backend: Backend, seed: int, draws: int) -> None:
    hold_xla_kernels(backend, seed, draws)
    hold_functions(backend, FUNCTIONS, seed, draws)
    hold_layers(backend, seed, draws)
    hold_collectives(backend, seed)


def test_what_runs_on_a_device_keeps_what_it_is_given(tmp_path: Path) -> None:
    run_devices(1, hold_all, SEED, DRAWS, folder=tmp_path)
