"""A run that was saved under one cut of its state goes on under any other, with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory as folders
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.manifest import DTYPES, read_manifest
from nxtrain.config.check import Resolved
from nxtrain.train.start import restore, shards_of
from nxtrain.train.step import TrainState, train_step
from tests.support.models import changed, weights_of
from tests.support.parity import LR, batches, layout, local_batch, start
from tests.support.ranks import RankPool
from tests.support.run_folders import meta, save

SAVED, STEPS = 2, 4
"""Steps before the checkpoint, and in all: the last loss is that of an update from what was loaded."""


def train(state: TrainState, resolved: Resolved, first: int, last: int) -> list[float]:
    """Losses of some steps of the run."""
    losses = []
    for batch in batches(resolved, last)[first:]:
        result = train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
        losses.append(state.backend.fetch({"loss": result.loss})["loss"])
    return losses


def straight(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], path: Path) -> list[float]:
    """Train, save on the way, and return the losses after that."""
    state = start(backend, resolved, weights)
    train(state, resolved, 0, SAVED)
    save(path, shards_of(state), state.layout, meta(), retention=Retention(keep=1))
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


@pytest.mark.parametrize(
    ("update", "loaded"),
    [("fp32", "none"), ("fp32_master", "zero1"), ("bf16_stochastic", "full"), ("bf16_kahan", "none")],
)
def test_a_changed_cut_changes_no_bit(ranks: RankPool, tmp_path: Path, update: str, loaded: str) -> None:
    """Each cut saves the same whole tensors, and goes on from those of one cut with the same losses.

    So each goes on from what any other saved. Sums of two terms have one order: all is equal, not close.
    """
    params = "fp32" if update == "fp32" else "bf16"
    plans = {
        cut: changed(layout("odd", params=params, update=update, **CUTS[cut]), optim={"clip": 0.0, "ema_decay": 0.3})
        for cut in ("none", "zero1", "full")
    }
    weights = weights_of(plans["none"])
    paths = {cut: folders.step_path(tmp_path / cut, SAVED) for cut in plans}
    losses = {cut: ranks.run(2, straight, plan, weights, paths[cut]) for cut, plan in plans.items()}
    tensors = {cut: saved_tensors(path) for cut, path in paths.items()}
    expected, want = losses[loaded], tensors[loaded]
    for cut, plan in plans.items():
        assert losses[cut] == expected, cut
        assert tensors[cut].keys() == want.keys()
        assert [key for key, tensor in want.items() if not torch.equal(tensors[cut][key], tensor)] == [], cut
        assert ranks.run(2, resumed, plan, weights, paths[loaded]) == expected, cut


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by its key."""
    manifest = read_manifest(path)
    files = {name: load_file(path / name) for name in manifest.files}
    tensors: dict[str, Tensor] = {}
    for key, entry in manifest.tensors.items():
        into = tensors[key] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        num_left = into.numel()
        for (offsets, sizes), name, _ in entry.parts():
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            into[box] = files[name][key]
            num_left -= into[box].numel()
        assert num_left == 0, f"{key} is not stored once"
    return tensors


def lost_state(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], path: Path) -> list[float]:
    state = start(backend, resolved, weights)
    restore(state, path, weights_only=True)
    state.optimizer.num_updates.fill_(SAVED)
    assert all(not torch.any(t) for t in state.optimizer.state["exp_avg"].values())
    return train(state, resolved, SAVED, STEPS)


def test_a_run_that_lost_its_state_would_be_seen(ranks: RankPool, tmp_path: Path) -> None:
    first, second = (layout("odd", **CUTS[cut]) for cut in ("none", "zero1"))
    path = folders.step_path(tmp_path, SAVED)
    expected = ranks.run(2, straight, first, weights_of(first), path)
    (actual, _) = ranks.run(2, lost_state, second, weights_of(first), path)
    assert actual[0] == pytest.approx(expected[0][0], abs=2e-6)  # the weights themselves
    assert abs(actual[-1] - expected[0][-1]) > 1e-4
