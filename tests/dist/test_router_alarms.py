"""A run whose routers collapse says so within 50 steps, and keeps the load of every expert."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pytest import MonkeyPatch

from nxtrain.backends.base import Backend
from nxtrain.common.run_folder import EXPERTS_FILE, LOGS_DIR
from nxtrain.config.check import Resolved
from nxtrain.train import step as training
from tests.support.models import BASE
from tests.support.ranks import RankPool
from tests.support.runs import GLOBAL_BATCH, SEQ_LEN, records, run_plan, train_rank

COLLAPSE, STEPS = 31, 81


def collapsing(folder: Path) -> Resolved:
    """A run whose tokens are all alike from a step on, so that each router gives all of them the same experts."""
    rows = np.random.default_rng(0).integers(0, BASE["vocab_size"], (STEPS * GLOBAL_BATCH, SEQ_LEN + 1), np.uint16)
    rows[(COLLAPSE - 1) * GLOBAL_BATCH :] = 7
    np.save(folder / "rows.npy", rows)
    return run_plan(
        folder / "run",
        {"source": "tokens", "path": str(folder / "rows.npy"), "shuffle": False},
        steps=STEPS,
        model={"family": "mixtral", "config": {"num_local_experts": 5, "num_experts_per_tok": 2}},
        parallel={"dp": 2, "ep": 1},
        optim={"lr": 1e-5, "min_lr": 1e-5},
        metrics={"log_every": 10},
        checkpoint={"every": 0},
    )


def without_counts(backend: Backend, resolved: Resolved) -> None:
    """Train without the counts of a step, in place of which each expert has the same."""
    take_sums = training._take_sums

    def even(state: training.TrainState) -> object:
        sums, loads = take_sums(state)
        assert loads is not None
        loads[:, :5] = loads[:, :5].mean()
        return sums, loads

    with MonkeyPatch.context() as patch:
        patch.setattr(training, "_take_sums", even)
        train_rank(backend, resolved)


@pytest.mark.parametrize("is_blind", [False, True])
def test_routers_that_collapse_are_named_within_50_steps(ranks: RankPool, tmp_path: Path, is_blind: bool) -> None:
    resolved = collapsing(tmp_path)
    ranks.run(2, without_counts if is_blind else train_rank, resolved)
    lines = records(resolved.config.run.dir)
    alarms = {line["step"]: line["alarm"] for line in lines if "router:" in line.get("alarm", "")}
    if is_blind:
        assert alarms == {}
        return
    ((step, text),) = alarms.items()
    assert COLLAPSE + 20 <= step < COLLAPSE + 50
    assert "routers of blocks 0, 1" in text
    assert [line["expert_load_max"] > 2.4 for line in lines] == [line["step"] >= COLLAPSE for line in lines]
    assert all(0 < line["router_entropy"] <= 1 and line["dropped_share"] == 0 for line in lines)
    kept = (resolved.config.run.dir / LOGS_DIR / EXPERTS_FILE).read_text(encoding="utf-8").splitlines()
    slots = [json.loads(line) for line in kept]
    assert [line["step"] for line in slots] == [line["step"] for line in lines]
    assert all(sum(row) == 2 * GLOBAL_BATCH * SEQ_LEN for line in slots for row in line["slots"])
    assert not any("expert_slots" in line for line in lines)
