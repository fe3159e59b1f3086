"""A run that stops and goes on is, bit for bit, the run that did not stop."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nxtrain.config.check import Resolved
from nxtrain.errors import CheckpointError
from tests.support.models import changed
from tests.support.ranks import RankPool
from tests.support.runs import assert_equal_bits, course, run_plan, state_at, token_file, train_rank

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1, "dp": 1},
    "tp2-sp": {"tp": 2, "dp": 1, "sequence_parallel": True},
    "dp2": {"tp": 1, "dp": 2},
}
PRECISIONS = {
    "alone": {"params": "fp32", "update": "fp32"},
    "tp2-sp": {"params": "bf16", "update": "fp32_master"},
    "dp2": {"params": "bf16", "update": "fp32_master", "reduce": "bf16"},
}


class Runs:
    """Runs on one file of tokens."""

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
            optim={"decay_steps": STEPS, "warmup_steps": 2},
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


@pytest.mark.parametrize("stop", [1, 3, 5])
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


def test_a_run_with_other_data_is_not_continued(runs: Runs) -> None:
    folder = runs.run(runs.plan("drifted", "alone", 2))
    before = (folder / "metrics.jsonl").read_bytes()
    token_file(runs.folder / "other.npy", num_rows=18, seed=1)
    resolved = runs.plan("drifted", "alone", STEPS)
    data = resolved.config.data.model_copy(update={"path": str(runs.folder / "other.npy")})
    moved = Resolved(resolved.config.model_copy(update={"data": data}), resolved.family, resolved.model)
    with pytest.raises(
        AssertionError, match=rf"{CheckpointError.__name__}: .*belongs to another run: data_fingerprint"
    ):
        runs.run(moved)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"update": "bf16_stochastic"},
            "its optimizer kept exp_avg, exp_avg_sq, master, and precision.update=bf16_stochastic keeps exp_avg, "
            "exp_avg_sq here",
        ),
        ({"state": "bf16"}, "state_dtype is 'float32' there and 'bfloat16' here"),
    ],
    ids=["update", "state"],
)
def test_a_run_under_another_rule_is_not_continued(runs: Runs, other: dict[str, str], reason: str) -> None:
    rule = {"params": "bf16", "update": "fp32_master"}
    name = "-".join(["ruled", *other])
    runs.run(changed(runs.plan(name, "alone", 2), precision=rule))
    with pytest.raises(AssertionError, match=rf"{CheckpointError.__name__}: .*belongs to another run: {reason}"):
        runs.run(changed(runs.plan(name, "alone", STEPS), precision={**rule, **other}))
