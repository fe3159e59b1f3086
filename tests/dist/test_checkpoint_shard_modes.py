"""A run that was saved under one cut of its state goes on under any other, with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import layout as folders
from nxtrain.checkpoint.save import save
from nxtrain.config.check import Resolved
from nxtrain.train.start import restore, shards_of
from nxtrain.train.step import TrainState, train_step
from tests.support.checkpoints import meta
from tests.support.models import changed, weights_of
from tests.support.parity import LR, batches, layout, local_batch, start
from tests.support.ranks import RankPool

SAVED, STEPS = 3, 6


def train(state: TrainState, resolved: Resolved, first: int, last: int) -> list[float]:
    """Losses of some steps of the run."""
    losses = []
    for batch in batches(resolved, last)[first:]:
        found = train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
        losses.append(state.backend.fetch({"loss": found.loss})["loss"])
    return losses


def straight(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], path: Path) -> list[float]:
    """Train, save on the way, and return the losses after that."""
    state = start(backend, resolved, weights)
    train(state, resolved, 0, SAVED)
    save(path, shards_of(state), state.layout, meta(), keep=1)
    return train(state, resolved, SAVED, STEPS)


def resumed(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], path: Path) -> list[float]:
    """Go on from what was saved; the weights of the start are other ones."""
    state = start(backend, resolved, {name: weight + 1 for name, weight in weights.items()})
    restore(state, path, weights_only=False)
    state.optimizer.num_updates.fill_(SAVED)
    return train(state, resolved, SAVED, STEPS)


CUTS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1, "dp": 1, "micro": 4},
    "none": {"tp": 1, "dp": 2, "micro": 2},
    "zero1": {"tp": 1, "dp": 2, "micro": 2, "shard": "zero1"},
    "full": {"tp": 1, "dp": 2, "micro": 2, "shard": "full"},
    "tp2-zero1": {"tp": 2, "dp": 2, "micro": 2, "shard": "zero1"},
    "hybrid": {"tp": 1, "dp": 4, "micro": 1, "shard": "hybrid", "shard_size": 2},
    "zero1-of-4": {"tp": 1, "dp": 4, "micro": 1, "shard": "zero1"},
}


@pytest.mark.parametrize("update", ["fp32", "fp32_master", "bf16_stochastic", "bf16_kahan"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("none", "zero1"), ("zero1", "none"), ("zero1", "full"), ("full", "zero1"), ("full", "none"), ("none", "full")],
)
def test_a_changed_cut_changes_no_bit(ranks: RankPool, tmp_path: Path, saved: str, loaded: str, update: str) -> None:
    """Sums of two terms have one order, so that the losses are equal, not close."""
    params = "fp32" if update == "fp32" else "bf16"
    first, second = (
        changed(layout("odd", params=params, update=update, **CUTS[cut]), optim={"clip": 0.0})
        for cut in (saved, loaded)
    )
    path = folders.step_path(tmp_path, SAVED)
    weights = weights_of(first)
    expected = ranks.run(2, straight, first, weights, path)
    assert ranks.run(2, resumed, second, weights, path) == expected


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("alone", "zero1-of-4"), ("zero1-of-4", "alone"), ("tp2-zero1", "hybrid"), ("hybrid", "tp2-zero1")],
)
def test_any_degree_loads_what_another_saved(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    first, second = (layout("odd", **CUTS[cut]) for cut in (saved, loaded))
    path = folders.step_path(tmp_path, SAVED)
    weights = weights_of(first)
    expected = ranks.run(CUTS[saved]["tp"] * CUTS[saved]["dp"], straight, first, weights, path)
    for found in ranks.run(CUTS[loaded]["tp"] * CUTS[loaded]["dp"], resumed, second, weights, path):
        assert found == pytest.approx(expected[0], abs=2e-6)


def lost_state(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], path: Path) -> list[float]:
    """Go on with the weights alone."""
    state = start(backend, resolved, weights)
    restore(state, path, weights_only=True)
    state.optimizer.num_updates.fill_(SAVED)
    assert all(not torch.any(t) for t in state.optimizer.state["exp_avg"].values())
    return train(state, resolved, SAVED, STEPS)


def test_a_run_that_lost_its_state_would_be_seen(ranks: RankPool, tmp_path: Path) -> None:
    first, second = (layout("odd", **CUTS[cut]) for cut in ("none", "zero1"))
    path = folders.step_path(tmp_path, SAVED)
    expected = ranks.run(2, straight, first, weights_of(first), path)
    (found, _) = ranks.run(2, lost_state, second, weights_of(first), path)
    assert found[0] == pytest.approx(expected[0][0], abs=2e-6)  # the weights themselves
    assert abs(found[-1] - expected[0][-1]) > 1e-4
