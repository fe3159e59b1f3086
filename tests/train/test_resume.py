"""A run that stops and goes on is, bit for bit, the run that did not stop."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.check import Resolved
from tests.support.drawn import one_in
from tests.support.models import changed
from tests.support.ranks import RankPool
from tests.support.runs import (
    GLOBAL_BATCH,
    SEQ_LEN,
    assert_equal_bits,
    course,
    run_plan,
    state_at,
    token_file,
    train_rank,
)

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1, "dp": 1},
    "tp2-sp": {"tp": 2, "dp": 1, "sequence_parallel": True},
    "dp2": {"tp": 1, "dp": 2},
    "full": {"tp": 1, "dp": 2, "shard": "full"},
    "muon": {"tp": 1, "dp": 2, "shard": "zero1"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "alone": {"params": "fp32", "update": "fp32"},
    "tp2-sp": {"params": "bf16", "update": "fp32_master"},
    "dp2": {"params": "bf16", "update": "fp32_master", "reduce": "bf16"},
    # The first steps overflow; every second step without overflow doubles the scale, so that later ones do too.
    "full": {"params": "fp16", "update": "fp32_master", "loss_scale": 2.0**22, "loss_scale_every": 2},
    "muon": {"params": "bf16", "update": "bf16_stochastic", "state": "bf16"},
}


class Runs:
    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}
        self.straight = cache(self._straight)

    def plan(self, name: str, layout: str, steps: int, **checkpoint: Any) -> Resolved:
        return run_plan(
            self.folder / name,
            self.data,
            steps=steps,
            parallel=LAYOUTS[layout],
            precision=PRECISIONS[layout],
            optim={
                "decay_steps": STEPS,
                "warmup_steps": 2,
                "name": "muon" if layout == "muon" else "adamw",
                "ema_decay": 0.0 if layout == "dp2" else 0.7,
            },
            checkpoint={"every": STEPS, **checkpoint},
        )

    def run(self, resolved: Resolved) -> Path:
        self.ranks.run(resolved.config.parallel.tp * resolved.config.parallel.dp, train_rank, resolved)
        return resolved.config.run.dir

    def _straight(self, layout: str) -> Path:
        return self.run(self.plan(f"straight-{layout}", layout, STEPS))


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("stop", one_in(2, [3, 1, 5]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_after_any_step_is_the_straight_run(runs: Runs, layout: str, stop: int) -> None:
    straight, name = runs.straight(layout), f"{layout}-{stop}"
    runs.run(runs.plan(name, layout, stop))
    broken = runs.run(runs.plan(name, layout, STEPS))
    assert [record["step"] for record in course(broken)] == list(range(1, STEPS + 1))
    assert course(broken) == course(straight)
    whole = runs.plan(name, layout, STEPS)
    states = [runs.ranks.run(1, state_at, run, STEPS, whole)[0] for run in (broken, straight)]
    assert_equal_bits(*states)
    kept = [read_meta(directory.step_path(run / CHECKPOINTS_DIR, STEPS)).loss_scale for run in (broken, straight)]
    assert kept[0] == kept[1]
    if layout == "full":
        scales = [record["loss_scale"] for record in course(broken)]
        skipped = [step for record in course(broken) for step in record.get("skipped_steps", ())]
        assert kept[0]["scale"] == scales[-1] and kept[0]["num_updates"] == STEPS - len(skipped)
        assert skipped and scales[0] < 2.0**22 and len(skipped) < STEPS


def test_steps_after_the_checkpoint_are_repeated_and_recorded_once(runs: Runs) -> None:
    """As after a crash: six steps are on record, the newest checkpoint that is left is that of the fourth."""
    straight, name = runs.straight("alone"), "crashed"
    folder = runs.run(runs.plan(name, "alone", STEPS, every=4))
    newest = folder / "checkpoints" / "step-00000006"
    newest.rename(folder / "checkpoints" / "step-00000006.old")
    runs.run(runs.plan(name, "alone", STEPS, every=4))
    assert course(folder) == course(straight)
    assert newest.is_dir()


def test_a_seed_draws_other_weights_and_another_order(runs: Runs) -> None:
    straight = runs.straight("alone")
    resolved = runs.plan("other-seed", "alone", 1)
    config = resolved.config.model_copy(update={"run": resolved.config.run.model_copy(update={"seed": 1})})
    other = runs.run(Resolved(config, resolved.family, resolved.model))
    assert course(other)[0]["param_norm"] != course(straight)[0]["param_norm"]


def test_another_optimizer_is_refused_with_the_way_out(runs: Runs) -> None:
    resolved = runs.plan("optimizer", "dp2", 2)
    runs.run(resolved)
    there, here = "kept exp_avg, exp_avg_sq, master", "optim.name=muon with precision.update=fp32_master"
    other = changed(runs.plan("optimizer", "dp2", STEPS), optim={"name": "muon"})
    with pytest.raises(
        AssertionError, match=f"{there}, and {here} keeps .*momentum_buffer here.*checkpoint.resume=never"
    ):
        runs.run(other)


def test_another_batch_is_refused_unless_allowed_and_then_goes_on_where_the_data_stood(runs: Runs) -> None:
    resolved = runs.plan("batch", "alone", 2)
    folder = runs.run(resolved)
    wider = changed(runs.plan("batch", "alone", STEPS), train={"global_batch": 2 * GLOBAL_BATCH})
    with pytest.raises(AssertionError, match=r"train\.global_batch is 4 there and 8 here.*allow_drift=\[.batch.\]"):
        runs.run(wider)
    runs.run(changed(wider, checkpoint={"allow_drift": ("batch",)}))
    meta = read_meta(folder / "checkpoints" / f"step-{STEPS:08d}")
    assert meta.samples == 2 * GLOBAL_BATCH + (STEPS - 2) * 2 * GLOBAL_BATCH
    assert meta.tokens == meta.samples * SEQ_LEN
    straight = course(runs.straight("alone"))
    assert course(folder)[2]["tokens"] == straight[3]["tokens"]
