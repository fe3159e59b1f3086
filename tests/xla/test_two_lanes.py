"""A run begun by PyTorch/XLA on Neuron devices goes on by TorchNeuron and back, on the stand-ins of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from tests.support import fake_neuron
from tests.support.neuron_machine import assert_real
from tests.support.parity import layout
from tests.support.ranks import RankPool
from tests.support.runs import records, train_rank
from tests.xla.test_neuron_train import Machine

STEPS = 6
SCHEDULE = ("optim.schedule=cosine", "optim.warmup_steps=2", f"optim.decay_steps={STEPS}", "optim.min_lr=1e-4")
"""A rate of its own for each step, so that a schedule that begins anew is seen."""


@pytest.fixture
def native() -> Iterator[RankPool]:
    pool = RankPool("neuron-native", fake_neuron.install)
    yield pool
    pool.close()


def planned(machine: Machine, backend: str, run: str, steps: int, *overrides: str) -> Resolved:
    fixed = (f"backend.name={backend}", f"run.dir={machine.folder / run}", f"train.steps={steps}", "cluster.instance=")
    return resolve_config(load(machine.config, [*SCHEDULE, *fixed, *overrides]), None)


def continued(backend: Backend, resolved: Resolved) -> str:
    """Train, and name the backend that did."""
    train_rank(backend, resolved)
    return backend.name


def test_a_run_crosses_the_lanes_and_comes_back_with_the_losses_of_one_run(tmp_path: Path, native: RankPool) -> None:
    machine = Machine.furnished(tmp_path, layout("gqa2", tp=1, micro=2), STEPS)
    machine.train(*SCHEDULE, "train.steps=2")
    two = planned(machine, "neuron-native", "run", 4, "parallel.dp=2", "parallel.shard=zero1")
    assert native.run(2, continued, two) == ["neuron-native"] * 2
    machine.train(*SCHEDULE, f"train.steps={STEPS}")
    assert_real(tmp_path, processes=2)

    cpu = open_backend("cpu")
    train_rank(cpu, planned(machine, "cpu", "whole", STEPS))
    cpu.close()
    result, whole = records(tmp_path / "run"), records(tmp_path / "whole")
    assert [line["step"] for line in result] == [*range(1, STEPS + 1)]
    assert len({line["lr"] for line in result}) == STEPS
    for key, tolerance in (("lr", 1e-12), ("loss", 2e-6), ("tokens", 0)):
        assert [line[key] for line in result] == pytest.approx([line[key] for line in whole], rel=0, abs=tolerance), key
    assert [line["grad_norm"] for line in result] == pytest.approx([line["grad_norm"] for line in whole], rel=1e-5)
