"""Numbers that go wrong in a run of several ranks: nothing of them reaches a weight, and the right rank is blamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import NxtrainError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.common.testing import faults
from nxtrain.common.testing.fault_points import PatchPoint
from nxtrain.config.check import Resolved
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support.ranks import RankPool, ranks
from tests.support.runs import GLOBAL_BATCH, assert_equal_bits, course, run_plan, state_at, token_file


@contextmanager
def armed(text: str, run_dir: Path, rank: int) -> Iterator[None]:
    undo: list[Callable[[], None]] = []
    replace = faults._replace

    def recorded(target: PatchPoint, wrapper: Any) -> None:
        owner, attribute = faults.owner_of(target), target.attribute
        before = getattr(owner, attribute)
        undo.append(lambda: setattr(owner, attribute, before))
        replace(target, wrapper)

    faults._replace = recorded
    try:
        if text:
            faults.arm(text, run_dir, rank)
        yield
    finally:
        faults._replace = replace
        for revert in reversed(undo):
            revert()


def train_broken(backend: Backend, resolved: Resolved, text: str) -> str:
    """One rank of a run with faults; how it failed, empty if it did not."""
    with armed(text, resolved.config.run.dir, backend.rank):
        try:
            train_on(RunContext.open(backend, resolved))
        except NxtrainError as error:
            return f"{type(error).__name__}: {error}"
    return ""


__all__ = ["ranks"]

STEPS = 5


class Broken:
    """Runs on one file of tokens, on some ranks."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.data = {"source": "tokens", "path": str(token_file(folder / "rows.npy", num_rows=18))}

    def plan(self, name: str, *, dp: int = 2, update: str = "fp32", shard: str = "none", **sections: Any) -> Resolved:
        params = "fp32" if update == "fp32" else "bf16"
        parallel = {"tp": 1, "dp": dp, "shard": shard, **sections.pop("parallel", {})}
        tables: dict[str, Any] = {
            "parallel": parallel,
            "precision": {"params": params, "update": update},
            "checkpoint": {"every": 1, "keep": 100, "async": False},
            "train": {"global_batch": 12 if dp == 3 else GLOBAL_BATCH},
        }
        for key, table in sections.items():
            tables[key] = {**tables.get(key, {}), **table}
        return run_plan(
            self.folder / name, self.data, **{"steps": STEPS, **tables, "train": {"steps": STEPS, **tables["train"]}}
        )

    def run(self, resolved: Resolved, faults: str = "") -> list[str]:
        return self.ranks.run(resolved.config.parallel.dp, train_broken, resolved, faults)


@pytest.fixture(scope="module")
def broken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    return Broken(ranks, tmp_path_factory.mktemp("broken"))


def lines(resolved: Resolved, name: str) -> list[dict[str, Any]]:
    file = resolved.config.run.dir / "logs" / name
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def at(resolved: Resolved, step: int) -> Any:
    return state_at(CpuBackend(), resolved.config.run.dir, step, resolved)


def saved(resolved: Resolved) -> list[int]:
    return [read_meta(path).step for path in directory.list_checkpoints(resolved.config.run.dir / CHECKPOINTS_DIR)]


MODES = ["none", "zero1", "grad_op", "full"]
CASES = [
    *[("fp32", shard, "nan@1:3:reduce") for shard in MODES],
    *[(update, "none", "inf@0:3:reduce") for update in ("fp32_master", "bf16_stochastic", "bf16_kahan")],
    ("bf16_kahan", "zero1", "nan@0:3:bwd"),
    ("bf16_stochastic", "full", "nan@*:3:fwd"),
    ("bf16_kahan", "full", "inf@1:3:bwd"),
]


@pytest.mark.parametrize(("update", "shard", "fault"), CASES)
def test_a_bad_step_leaves_every_bit_and_the_run_goes_on(broken: Broken, update: str, shard: str, fault: str) -> None:
    plans = []
    for attempt in "ab":
        name = f"skip-{update}-{shard}-{fault}-{attempt}".replace("*", "all").replace(":", "-")
        plans.append(broken.plan(name, update=update, shard=shard, recovery={"non_finite": "skip"}))
        assert broken.run(plans[-1], fault) == ["", ""]
    one, again = plans
    before, bad, after = (at(one, step) for step in (2, 3, 4))
    assert_equal_bits(before, bad)
    assert not all(after["model"][name].equal(x) for name, x in bad["model"].items())
    for record in course(one.config.run.dir):
        is_bad = record["step"] == 3
        assert record.get("skipped_steps") == ([3] if is_bad else None)
        assert (record["loss"] is None or record["grad_norm"] is None) is is_bad
    assert course(one.config.run.dir) == course(again.config.run.dir)
    assert_equal_bits(at(one, STEPS), at(again, STEPS))
    (noted,) = lines(one, "non_finite.jsonl")
    assert (noted["step"], noted["verdict"], noted["positions"]) == (3, "skipped", [2 * GLOBAL_BATCH, 3 * GLOBAL_BATCH])


def test_a_run_that_stops_names_the_first_bad_step_though_it_looks_later(broken: Broken) -> None:
    plan = broken.plan("stop", metrics={"log_every": 4}, checkpoint={"every": 4})
    for output in broken.run(plan, "nan@1:2:reduce,inf@0:3:bwd"):
        assert output.startswith("DivergedError: steps 2, 3: the last with loss=inf, grad_norm=")
        assert "nothing was updated by them" in output
        assert "a lower optim.lr" in output
    assert saved(plan) == []
    assert [(line["step"], line["loss"], line["verdict"]) for line in lines(plan, "non_finite.jsonl")] == [
        (2, None, "stopped"),
        (3, "inf", "stopped"),
    ]


def test_a_bad_step_that_is_fine_when_replayed_was_the_machine(broken: Broken) -> None:
    options: dict[str, Any] = {"recovery": {"non_finite": "rollback"}, "checkpoint": {"every": 2}}
    straight, plan = broken.plan("straight", **options), broken.plan("transient", **options)
    assert broken.run(straight) == ["", ""]
    for output in broken.run(plan, "nan@1:4:reduce"):
        assert output.startswith("RestartError: step 4: loss=")
    assert saved(plan) == [2]
    assert broken.run(plan, "nan@1:4:reduce") == ["", ""]
    assert course(plan.config.run.dir) == course(straight.config.run.dir)
    assert_equal_bits(at(plan, STEPS), at(straight, STEPS))
    assert [(line["step"], line["verdict"]) for line in lines(plan, "non_finite.jsonl")] == [
        (4, "rolled_back"),
        (4, "transient"),
    ]


def test_a_bad_step_that_recurs_is_skipped_from_then_on(broken: Broken) -> None:
    skips = broken.plan("skips", recovery={"non_finite": "skip"}, checkpoint={"every": 2})
    plan = broken.plan("persistent", recovery={"non_finite": "rollback"}, checkpoint={"every": 2})
    assert broken.run(skips, "nan@1:4:reduce") == ["", ""]
    assert [output.split(":")[0] for output in broken.run(plan, "nan!@1:4:reduce")] == ["RestartError"] * 2
    assert broken.run(plan, "nan!@1:4:reduce") == ["", ""]
    assert_equal_bits(at(plan, STEPS), at(skips, STEPS))
    assert course(plan.config.run.dir) == course(skips.config.run.dir)
    assert [line["verdict"] for line in lines(plan, "non_finite.jsonl")] == ["rolled_back", "persistent"]


VOTES = [
    (2, "none", "fp32", "ranks 0 and 1 differ in", [0, 1]),
    (3, "none", "bf16_kahan", "rank 1 differs from ranks 0 and 2 in", [1]),
    (3, "zero1", "fp32_master", "rank 1 differs from ranks 0 and 2 in", [1]),
    (4, "hybrid", "fp32", "ranks 1 and 3 differ in", [1, 3]),
]


@pytest.mark.parametrize(("dp", "shard", "update", "output", "named"), VOTES)
def test_a_flipped_bit_of_a_replica_is_found_before_it_is_saved(
    broken: Broken, dp: int, shard: str, update: str, output: str, named: list[int]
) -> None:
    options: dict[str, Any] = {
        "dp": dp,
        "shard": shard,
        "update": update,
        "parallel": {"shard_size": 2} if shard == "hybrid" else {},
        "checkpoint": {"every": 2},
        "recovery": {"vote_every": 100},
    }
    straight, plan = broken.plan(f"vote-{shard}-{dp}-straight", **options), broken.plan(f"vote-{shard}-{dp}", **options)
    fault = "flip@1:4:post_step"
    assert broken.run(straight) == [""] * dp
    said = broken.run(plan, fault)
    assert {text.split(":")[0] for text in said} == {"RestartError"}
    assert sum(output in text for text in said) == (2 if shard == "hybrid" else dp)
    assert not any("was named" in text for text in said), "never before"
    assert saved(plan) == [2]
    (noted,) = lines(plan, "votes.jsonl")
    assert (noted["step"], noted["ranks"]) == (4, named)
    assert broken.run(plan, fault) == [""] * dp
    assert course(plan.config.run.dir) == course(straight.config.run.dir)
    assert_equal_bits(at(plan, STEPS), at(straight, STEPS))


def test_a_flip_is_found_within_so_many_steps_and_not_without_a_vote(broken: Broken) -> None:
    """Under bf16_stochastic nothing writes over the parameter: the replicas stay apart."""
    options: dict[str, Any] = {"update": "bf16_stochastic", "checkpoint": {"every": 0}}
    fault = "flip@1:2:post_step"
    assert broken.run(broken.plan("unvoted", **options), fault) == ["", ""]
    said = broken.run(broken.plan("voted", **options, recovery={"vote_every": 3}), fault)
    assert all(text.startswith("RestartError: step 3: the replicas") for text in said)


def test_a_spike_is_told_in_the_record_and_growth_ends_the_run(broken: Broken) -> None:
    quiet: dict[str, Any] = {"checkpoint": {"every": 0}, "optim": {"lr": 1e-4, "min_lr": 1e-4}, "train": {"steps": 60}}
    spike = broken.plan("spike", dp=1, **quiet)
    assert broken.run(spike, "spike@*:20:reduce:30") == [""]
    alarms = {record["step"]: record["alarm"] for record in course(spike.config.run.dir) if "alarm" in record}
    assert list(alarms) == [20]
    assert alarms[20].startswith("spike: grad_norm")
    grows = broken.plan("grows", dp=1, **quiet, recovery={"on_divergence": "stop"})
    (output,) = broken.run(grows, "spike@*:20:reduce:30:30")
    assert output.startswith("DivergedError: step 3")
    assert "recovery.on_divergence=stop" in output
