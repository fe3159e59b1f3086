"""Runs that stop inside each piece of a schedule, that are annealed from a checkpoint, and that warm up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from nxtrain.optim.schedule import Schedule
from tests.support.ranks import RankPool
from tests.support.runs import assert_equal_bits, course, records, run_plan, state_at, token_file, train_rank

STEPS = 9
PIECES = [
    {"steps": 2, "lr": 1e-2},
    {"steps": 2, "lr": 8e-3, "shape": "constant"},
    {"steps": 2, "lr": 4e-3, "shape": "cosine"},
    {"steps": 3, "lr": 1e-3, "shape": "sqrt"},
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "wsd": {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 3, "decay_shape": "sqrt"},
    "pieces": {"schedule": "pieces", "pieces": PIECES},
    "inverse_sqrt": {
        "schedule": "inverse_sqrt",
        "warmup_steps": 2,
        "weight_decay_schedule": "corrected",
        "weight_decay_pieces": [{"steps": 3, "to": 1.0}, {"steps": 4, "to": 0.2, "shape": "cosine"}],
        "beta2_pieces": [{"steps": 5, "to": 0.99}],
    },
}


def planned(folder: Path, steps: int, resume: str = "auto", **optim: Any) -> Resolved:
    rows = folder.parent / "rows.npy"
    if not rows.exists():
        token_file(rows, num_rows=18)
    data = {"source": "tokens", "path": str(rows)}
    checkpoint = {"every": 1, "keep": 20, "async": False, "resume": resume}  # no step is passed over
    return run_plan(folder, data, steps=steps, optim=optim, checkpoint=checkpoint)


def rates(folder: Path) -> list[float]:
    return [record["lr"] for record in records(folder)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_run_that_stops_inside_each_piece_is_the_straight_run(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    optim = {**SCHEDULES[kind], "min_lr": 1e-3}
    straight = planned(tmp_path / "straight", STEPS, **optim)
    ranks.run(1, train_rank, straight)
    schedule = Schedule.of(straight.config)
    assert rates(tmp_path / "straight") == [schedule.at(step) for step in range(1, STEPS + 1)]
    for steps in (2, 4, 5, 8, STEPS):
        part = planned(tmp_path / "parts", steps, **optim)
        if kind == "wsd":  # its decay ends with the run, so that a part needs the whole in other words
            whole = [{"steps": 3, "lr": 1e-2}, {"steps": 3, "lr": 1e-2}, {"steps": 3, "lr": 1e-3, "shape": "sqrt"}]
            part = planned(tmp_path / "parts", steps, schedule="pieces", pieces=whole)
        ranks.run(1, train_rank, part)
    assert course(tmp_path / "parts") == course(tmp_path / "straight")
    runs = [tmp_path / name for name in ("parts", "straight")]
    assert_equal_bits(*(ranks.run(1, state_at, run, STEPS, straight)[0] for run in runs))


def test_a_run_is_annealed_from_any_checkpoint_and_warms_up_again_exactly(ranks: RankPool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    ranks.run(1, train_rank, planned(base, 6, schedule="constant"))
    start = str(directory.step_path(base / CHECKPOINTS_DIR, 4))
    annealed = planned(tmp_path / "annealed", 7, resume=start, schedule="wsd", decay_steps=3, min_lr=0.0)
    ranks.run(1, train_rank, annealed)
    assert rates(tmp_path / "annealed") == pytest.approx([1e-2 * 2 / 3, 1e-2 / 3, 0.0])

    optim = {"schedule": "constant", "rewarm_steps": 4}
    straight = planned(tmp_path / "risen", 10, resume=start, **optim)
    ranks.run(1, train_rank, straight)
    assert rates(tmp_path / "risen") == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2])
    for steps in (5, 7, 10):  # the second and third start go on from the run's own checkpoint
        ranks.run(1, train_rank, planned(tmp_path / "parts", steps, resume=start, **optim))
        newest = directory.step_path(tmp_path / "parts" / CHECKPOINTS_DIR, steps)
        assert read_meta(newest).rewarm_after == 4
        start = "auto"
    assert course(tmp_path / "parts") == course(tmp_path / "risen")
