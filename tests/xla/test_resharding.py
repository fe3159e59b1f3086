"""Checkpoints of gloo ranks under any layout resume on an XLA device with unchanged losses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxtrain.backends import open_backend
from nxtrain.common.process.placement import Placement
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support.recovery import LAYOUTS, SAVED, after, continued, plan, world_of
from tests.support.runs import token_file, train_rank
from tests.support.xla_engine import ONE_DEVICE, TIMEOUT_S, run_ranks
from tests.support.xla_processes import start

ALONE = {"tp": 1, "dp": 1}
ROWS = "rows.npy"


def save(place: Placement, folder: Path, name: str) -> None:
    """Train one gloo rank of a layout."""
    backend = open_backend("cpu")
    train_rank(backend, plan(folder / name, LAYOUTS[name], folder / ROWS))
    backend.close()


def go_on(folder: Path) -> None:
    """Continue the run of each layout on one XLA device."""
    backend = open_backend("xla")
    for name in LAYOUTS:
        checkpoint = folder / name / "checkpoints" / f"step-{SAVED:08d}"
        train_on(RunContext.open(backend, continued(folder / f"xla-{name}", ALONE, folder / ROWS, checkpoint)))
    backend.close()


def test_the_next_losses_are_those_of_the_run_that_was_saved(tmp_path: Path) -> None:
    token_file(tmp_path / ROWS, num_rows=40)
    for name, layout in LAYOUTS.items():
        jobs = tmp_path / f"ranks-{name}"
        jobs.mkdir()
        run_ranks(world_of(layout), save, tmp_path, name, folder=jobs)
    done = start(go_on, tmp_path, env={**os.environ, **ONE_DEVICE}, log=tmp_path / "log.txt").ended(TIMEOUT_S)
    assert done.code == 0, done.printed
    for name in LAYOUTS:
        found, expected = after(tmp_path / f"xla-{name}"), after(tmp_path / name)
        assert len(found) == len(expected) == 5
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6), name
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), name
