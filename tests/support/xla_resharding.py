"""Runs that gloo ranks save under several layouts, and that an XLA device goes on with."""

from __future__ import annotations

from pathlib import Path

from nxtrain.backends import open_backend
from nxtrain.common.process.placement import Placement
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support.resharding import LAYOUTS, SAVED, continued, plan
from tests.support.runs import train_rank

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
