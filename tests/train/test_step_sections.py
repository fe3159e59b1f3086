"""Sections of the steps of real runs: they add up to the step, and time lost in a section is found there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.grads import Gradients
from nxtrain.train import step as step_module
from tests.support.ranks import RankPool
from tests.support.runs import course, records, run_plan, token_file, train_rank

STEPS, EVERY = 20, 10
LOST_S = {"reduce_s": 0.01, "optimizer_s": 0.02, "backward_s": 0.03}
"""Seconds that a slowed run loses in each step, by the key that must show them."""


def slowed(backend: Backend, resolved: Resolved) -> None:
    """One rank of a run that loses `LOST_S` in each step."""
    places: list[tuple[Any, str, str]] = [
        *((Gradients, "reduce", "reduce_s"), (AdamW, "step", "optimizer_s")),
        (step_module, "_sums", "backward_s"),  # follows the backward pass of a micro-batch
    ]
    with pytest.MonkeyPatch.context() as patched:
        for owner, name, key in places:
            patched.setattr(owner, name, _late(getattr(owner, name), LOST_S[key]))
        train_rank(backend, resolved)


def _late(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return late


def runs(folder: Path, name: str, world: int, **sections: Any) -> Resolved:
    data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}
    tables = {"parallel": {"tp": 1, "dp": world}, "checkpoint": {"every": 0}, **sections}
    tables["metrics"] = {"log_every": EVERY, "tensorboard": False, "progress": False, **sections.get("metrics", {})}
    tables["train"] = {"steps": STEPS, "global_batch": world, **sections.get("train", {})}
    return run_plan(folder / name, data, steps=STEPS, **tables)


@pytest.mark.alone
@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {}), (2, {"dp": 1, "pp": 2})], ids=["1", "dp2", "pp2"])
def test_sections_add_up_to_the_step_and_show_where_time_is_lost(
    ranks: RankPool, tmp_path: Path, world: int, parallel: dict[str, Any]
) -> None:
    """The throughput meter's clock is the other one: it knows no kinds of work."""
    resolved = runs(tmp_path, "slow", world, parallel={"tp": 1, "dp": world, **parallel})
    ranks.run(world, slowed, resolved)
    *_, last = records(resolved.config.run.dir)
    step_s = last["step_time_s"] * (STEPS - EVERY)
    assert sum(last[key] for key in KINDS_S) == pytest.approx(step_s, rel=0.02)
    sections = {key: last[key] / EVERY for key in SECTIONS_S}
    assert sum(sections.values()) <= last["training_s"] / EVERY + 1e-9
    # The first stage of a pipeline has no losses, whose function is slowed.
    lost = {key: s for key, s in LOST_S.items() if key != "backward_s" or "pp" not in parallel}
    # Time that one section shows in error is missing in another, so that lower bounds are enough.
    assert all(sections[key] >= lost_s for key, lost_s in lost.items()), sections
    assert sections["forward_s"] > 0
    if world > 1:
        assert last["waiting_s"] > 0


def test_a_run_without_sections_has_none_and_the_same_numbers(ranks: RankPool, tmp_path: Path) -> None:
    plans = [runs(tmp_path, name, 1, metrics={"step_sections": name}) for name in ("auto", "off")]
    for plan in plans:
        ranks.run(1, train_rank, plan)
    divided, whole = (records(plan.config.run.dir) for plan in plans)
    assert all(set(SECTIONS_S) <= set(record) for record in divided)
    assert not any(set(SECTIONS_S) & set(record) for record in whole)
    assert course(plans[0].config.run.dir) == course(plans[1].config.run.dir)
