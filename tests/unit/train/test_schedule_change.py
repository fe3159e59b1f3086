"""Runs that are extended, annealed or warmed up again: the step of the rise, and the line that tells the change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint.meta import Meta
from nxtrain.config.check import Resolved
from nxtrain.train.compatibility import RunInputs, changes, meta_at, refuse_drift
from nxtrain.train.schedule_change import rate_changes, with_rewarming
from tests.support.runs import run_plan

INPUTS = RunInputs.of("rows", None)


def planned(steps: int, **optim: Any) -> Resolved:
    data = {"source": "tokens", "path": "rows.npy"}
    return run_plan(Path("run"), data, steps=steps, optim={"lr": 1e-2, "min_lr": 1e-3, **optim})


def saved(step: int, plan: Resolved, before: Meta | None = None) -> Meta:
    """Metadata of a checkpoint, as a later start reads it."""
    return Meta.model_validate_json(meta_at(step, plan, INPUTS, before).model_dump_json())


def message(meta: Meta, plan: Resolved) -> str:
    """Line about the learning rate, once the checkpoint is accepted without allow_drift."""
    fresh = meta_at(0, plan, INPUTS)
    refuse_drift(Path("step"), meta, fresh, plan)
    changes(meta, fresh)
    return rate_changes(with_rewarming(meta, plan.config, is_own=False), plan.config)


@pytest.mark.parametrize(
    "optim",
    [
        {},
        {"schedule": "constant"},
        {"schedule": "linear", "warmup_steps": 3},
        {"schedule": "inverse_sqrt", "warmup_ratio": 0.1},
        {"schedule": "wsd", "decay_ratio": 0.3, "decay_shape": "cosine"},
        {"schedule": "pieces", "pieces": [{"steps": 30, "lr": 1e-2, "shape": "sqrt"}]},
    ],
)
def test_the_same_schedule_is_not_told(optim: dict[str, Any]) -> None:
    plan = planned(40, **optim)
    for step in (1, 17, 39, 40):
        assert message(saved(step, plan), plan) == ""


def test_annealing_from_a_constant_rate() -> None:
    line = message(saved(30, planned(1000, schedule="constant")), planned(40, schedule="wsd", decay_steps=10))
    assert line == (
        "the learning rate was 0.01 at step 30 and is 0.0091 at step 31; steps 31 to 40: down to 0.001 (linear)"
    )


def test_a_longer_cosine_jumps_up_and_is_told_the_way_out() -> None:
    there = saved(40, planned(40))
    line = message(there, planned(400))
    assert "was 0.001 at step 40 and is 0.00977 at step 41" in line
    assert "WARNING: it jumps up; optim.rewarm_steps=N" in line
    risen = message(there, planned(400, rewarm_steps=20))
    assert "is 0.000488 at step 41" in risen and "WARNING" not in risen
    assert risen.endswith("it rises from 0 until step 60 (optim.rewarm_steps)")


def test_a_longer_constant_run_is_not_told() -> None:
    assert message(saved(40, planned(40, schedule="constant")), planned(400, schedule="constant")) == ""


def test_pieces_of_other_numbers_are_named_where_they_change() -> None:
    """They are not drift, and the line of settings has both values."""
    plan = planned(40, beta2_pieces=[{"steps": 9, "to": 0.99}], weight_decay_schedule="corrected")
    there = saved(3, planned(40))
    line = changes(there, meta_at(0, plan, INPUTS))
    assert "optim.weight_decay_schedule constant there, corrected here" in line
    assert "optim.beta2_pieces [] there, [{'steps': 9, 'to': 0.99, 'shape': 'linear'}] here" in line
    assert message(there, plan) == ""


def test_settings_of_other_versions_are_passed_over() -> None:
    plan = planned(40, schedule="linear")
    meta = saved(3, planned(40))
    assert message(meta.model_copy(update={"settings": {}}), plan) == ""
    assert message(meta.model_copy(update={"settings": {**meta.settings, "optim.schedule": "other"}}), plan) == ""


def test_the_rise_begins_once_and_goes_on_after_restarts() -> None:
    plan, other = planned(40, rewarm_steps=8), planned(40)
    begun = with_rewarming(saved(10, other), plan.config, is_own=False)
    assert begun.rewarm_after == 10
    later = saved(13, plan, begun)
    assert with_rewarming(later, plan.config, is_own=True).rewarm_after == 10
    assert with_rewarming(later, planned(40, rewarm_steps=9).config, is_own=True).rewarm_after == 13
    assert with_rewarming(later, plan.config, is_own=False).rewarm_after == 13
    assert with_rewarming(later, other.config, is_own=True).rewarm_after is None
    assert with_rewarming(saved(5, other), plan.config, is_own=True).rewarm_after == 5
    assert with_rewarming(saved(0, other), plan.config, is_own=False).rewarm_after is None
