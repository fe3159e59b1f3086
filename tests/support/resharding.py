"""Runs that are saved under one layout and go on under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxtrain.config.check import Resolved
from tests.support.models import changed
from tests.support.runs import course, run_plan

SAVED, STEPS = 3, 8
"""The step of the checkpoint, and the last; five follow it."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "dp": 1, "sequence_parallel": True},
    "pp2": {"tp": 1, "pp": 2, "dp": 1},
    "dp2-zero1": {"tp": 1, "dp": 2, "shard": "zero1"},
    "full": {"tp": 1, "dp": 2, "shard": "full"},
    "tp2-dp2": {"tp": 2, "dp": 2},
}
KEPT = ("step", "loss", "grad_norm", "param_norm", "lr", "tokens")


def plan(folder: Path, layout: dict[str, Any], rows: Path, **checkpoint: Any) -> Resolved:
    """A run of eight steps with one checkpoint after the third."""
    return run_plan(
        folder,
        {"source": "tokens", "path": str(rows)},
        steps=STEPS,
        parallel=layout,
        optim={"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "decay_steps": STEPS},
        checkpoint={"every": SAVED, "keep": 5, "async": True, **checkpoint},
    )


def world_of(layout: dict[str, Any]) -> int:
    """Ranks that a layout takes."""
    return int(layout["tp"] * layout.get("pp", 1) * layout["dp"])


def continued(folder: Path, layout: dict[str, Any], rows: Path, saved: Path) -> Resolved:
    """The same run from another's checkpoint on; another number of ranks is another sum order and nothing else."""
    return changed(plan(folder, layout, rows), checkpoint={"resume": str(saved)})


def after(folder: Path) -> list[dict[str, Any]]:
    """The records after the checkpoint."""
    return [{key: record[key] for key in KEPT} for record in course(folder) if record["step"] > SAVED]
