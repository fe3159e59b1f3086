"""A diverging run goes back and past the batches since then: it becomes the run whose data never had these batches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR
from nxtrain.config.check import Resolved
from nxtrain.train.health.rollbacks import BEFORE, MOST
from tests.faults.test_guard import Broken, armed, at, lines, saved, train_broken
from tests.support.models import BASE
from tests.support.ranks import RankPool, ranks
from tests.support.runs import GLOBAL_BATCH, SEQ_LEN, assert_equal_bits, course

__all__ = ["armed", "ranks", "train_broken"]

STEPS, EVERY = 44, 6
GROWS = "spike@*:26:reduce:30:30"
"""Thirty times the gradient from step 26 on."""


class Diverging(Broken):
    """Runs on rows in the order of their file, with a checkpoint every few steps."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        super().__init__(ranks, folder)
        self.rows = np.random.default_rng(5).integers(0, BASE["vocab_size"], (3 * STEPS * GLOBAL_BATCH, SEQ_LEN + 1))

    def planned(self, name: str, rows: Any, **sections: Any) -> Resolved:
        file = self.folder / f"{name}.npy"
        np.save(file, rows.astype(np.uint16))
        tables: dict[str, Any] = {
            "train": {"steps": STEPS},
            "checkpoint": {"every": EVERY, "keep": 100, "async": False},
            "optim": {"lr": 1e-4, "min_lr": 1e-4},
            "recovery": {"on_divergence": "rollback", "max_same_step": 0},
        }
        for key, table in sections.items():
            tables[key] = {**tables.get(key, {}), **table}
        resolved = self.plan(name, **tables)
        data = resolved.config.data.model_copy(update={"path": str(file), "shuffle": False})
        config = resolved.config.model_copy(update={"data": data})
        return Resolved(config, resolved.family, resolved.model)


@pytest.fixture(scope="module")
def diverging(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Diverging:
    return Diverging(ranks, tmp_path_factory.mktemp("diverging"))


def without(rows: Any, first: int, number: int) -> Any:
    """Rows without some batches, counted from 0."""
    return np.delete(rows, np.s_[first * GLOBAL_BATCH : (first + number) * GLOBAL_BATCH], axis=0)


def forget(resolved: Resolved, after: int) -> None:
    """Remove the checkpoints after a step, as a disk does that loses them."""
    for path in directory.list_checkpoints(resolved.config.run.dir / CHECKPOINTS_DIR):
        if directory.step_of(path) > after:
            shutil.rmtree(path)


def test_the_run_is_the_one_that_never_saw_the_batches(diverging: Diverging) -> None:
    plan = diverging.planned("rolled", diverging.rows, train={"steps": STEPS})
    said = diverging.run(plan, GROWS)
    assert {text.partition(":")[0] for text in said} == {"RestartError"}
    (asked,) = lines(plan, "rollbacks.jsonl")
    alarm = asked["step"]
    assert asked["keeps"] == alarm - BEFORE
    resumed = asked["keeps"] // EVERY * EVERY
    assert 0 < resumed < 26 <= alarm, "goes back to before the growth, though not to the beginning"
    assert saved(plan)[-1] > asked["keeps"], "a later checkpoint is abandoned"
    assert diverging.run(plan) == ["", ""]
    batches = alarm - resumed
    assert lines(plan, "rollbacks.jsonl")[1:] == [
        {"verdict": "rewound", "step": alarm, "resumed": resumed, "batches": batches}
    ]
    never = diverging.planned("never", without(diverging.rows, resumed, batches))
    assert diverging.run(never) == ["", ""]
    assert course(plan.config.run.dir) == course(never.config.run.dir)
    assert_equal_bits(at(plan, STEPS), at(never, STEPS))
    newest = directory.newest(plan.config.run.dir / CHECKPOINTS_DIR)
    assert newest is not None
    assert read_meta(newest).samples == (STEPS + batches) * GLOBAL_BATCH
    # A later start that lost checkpoints from after or before the rollback repeats the same batches.
    for after in (resumed + EVERY, resumed - EVERY):
        forget(plan, after)
        assert diverging.run(plan) == ["", ""]
        assert_equal_bits(at(plan, STEPS), at(never, STEPS))
        assert course(plan.config.run.dir) == course(never.config.run.dir)


def test_a_second_rollback_leaves_out_what_was_seen_since_the_first(diverging: Diverging) -> None:
    mirror = diverging.folder / "mirror"
    plan = diverging.planned("again", diverging.rows, parallel={"dp": 1}, checkpoint={"mirror": str(mirror)})
    for _ in range(2):
        assert {text.partition(":")[0] for text in diverging.run(plan, GROWS)} == {"RestartError"}
    assert diverging.run(plan) == [""]
    result = [line for line in lines(plan, "rollbacks.jsonl") if line["verdict"] == "rewound"]
    first, second = ((line["step"], line["resumed"], line["batches"]) for line in result)
    assert first[:2] == second[:2]
    assert second[2] == 2 * first[2], "those of both attempts"
    assert [*mirror.glob("step-*")], "whose checkpoints from the growth a start would take"
    never = diverging.planned("never-twice", without(diverging.rows, second[1], second[2]), parallel={"dp": 1})
    assert diverging.run(never) == [""]
    assert course(plan.config.run.dir) == course(never.config.run.dir)
    assert_equal_bits(at(plan, STEPS), at(never, STEPS))


def test_a_run_that_diverges_whatever_its_batches_ends(diverging: Diverging) -> None:
    plan = diverging.planned("hopeless", diverging.rows, parallel={"dp": 1})
    for _ in range(MOST + 1):
        (said,) = diverging.run(plan, GROWS)
    assert said.startswith("DivergedError: step ")
    assert f"rolled back to step 18 {MOST} times already" in said
    assert len(lines(plan, "rollbacks.jsonl")) == 2 * MOST


def test_without_a_checkpoint_from_before_the_growth_the_run_ends(diverging: Diverging) -> None:
    plan = diverging.planned("late", diverging.rows, parallel={"dp": 1}, checkpoint={"every": 30})
    (said,) = diverging.run(plan, GROWS)
    assert saved(plan) == [30]
    assert said.startswith("DivergedError: step ")
    assert "no checkpoint from step 20 or before is left. Those that are left: 30" in said
    assert "checkpoint.keep" in said
    assert not (plan.config.run.dir / LOGS_DIR / "rollbacks.jsonl").exists()
