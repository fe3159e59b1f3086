"""A run that is killed or hangs anywhere, and is started again, is the undisturbed run, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import HangError
from tests.support.command_ranks import WORLD, Ranks
from tests.support.recovery import (
    PACE,
    Golden,
    History,
    assert_recovered,
    configure,
    last_step,
    start,
    supervise,
)
from tests.support.runs import course

WAITS, WRITES_ON = "checkpoint.async=false", "checkpoint.async=true"
RAMP = "train.batch_ramp=[{global_batch = 2, samples = 18}]"
"""Nine steps of half the batch."""
SLOWLY = "sleep@*:1:fwd:0.1"
"""So that every checkpoint is written before the next is due."""


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_step(started_by: ForkServerContext, tmp_path: Path, golden: Golden, rank: int) -> None:
    """Four times in the same step, each time a little further."""
    configure(tmp_path)
    faults = [f"kill@{rank}:8:{point}" for point in ("fwd", "bwd", "reduce", "opt")]
    history = supervise(started_by, tmp_path, faults, most_restarts=4)
    assert_recovered(history, golden, restarts=4, within_s=200.0)
    assert len(history.fired) == 4
    for killed in history.starts[:-1]:
        assert killed.codes[rank] == -signal.SIGKILL
        assert killed.reached in {7, 8}  # reducing is done when the other is killed


CUT = ("parallel.shard=zero1", "precision.params=bf16", "precision.update=bf16_stochastic", RAMP)
EXPERTS = ("model.family=mixtral", "model.config.num_local_experts=4", "model.config.num_experts_per_tok=2")


@pytest.mark.parametrize("overrides", [CUT, (*EXPERTS, "parallel.ep=2")], ids=["cut", "experts"])
def test_in_a_step_of_cut_state(started_by: ForkServerContext, tmp_path: Path, overrides: Sequence[str]) -> None:
    """State in bf16, rounded at random, killed in both parts of a ramp of the batch; and divided experts."""
    runs = []
    for name, faults in (("golden", []), ("killed", ["kill@1:8:opt", "kill@0:11:ckpt_write:4096"])):
        configure(tmp_path / name)
        runs.append(supervise(started_by, tmp_path / name, [*faults], overrides=overrides))
    assert_recovered(runs[1], Golden.of(runs[0]))


def test_all_at_once(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)

    def kill(ranks: Ranks) -> None:
        if last_step(tmp_path) >= 8:
            ranks.send(signal.SIGKILL, 0, 1)

    killed = start(started_by, tmp_path, [PACE], meanwhile=kill)
    assert set(killed.codes.values()) == {-signal.SIGKILL}
    again = supervise(started_by, tmp_path)
    assert_recovered(History(tmp_path, [killed, *again.starts], again.wall_s), golden)


@pytest.mark.parametrize("how", [WAITS, WRITES_ON])
def test_in_the_midst_of_a_file(started_by: ForkServerContext, tmp_path: Path, golden: Golden, how: str) -> None:
    configure(tmp_path)
    pace = [SLOWLY] if how == WRITES_ON else []
    faults = ["kill@0:6:ckpt_write:4096", "kill@1:9:ckpt_write:4096", *pace]
    history = supervise(started_by, tmp_path, faults, overrides=[how])
    assert_recovered(history, golden, restarts=2, within_s=200.0)
    assert history.resumed == [3, 6]


@pytest.mark.parametrize(
    ("points", "how", "expected"),
    [
        (("ckpt_stage", "ckpt_fsync", "ckpt_commit", "ckpt_rename", "ckpt_latest"), WAITS, [3, 3, 3, 3, 6]),
        (("ckpt_commit", "ckpt_latest"), WRITES_ON, [3, 6]),
    ],
    ids=["waits", "writes-on"],
)
def test_between_the_parts_of_a_commit(
    started_by: ForkServerContext,
    tmp_path: Path,
    golden: Golden,
    points: tuple[str, ...],
    how: str,
    expected: list[int],
) -> None:
    """The save of one step again and again, each time a part further."""
    configure(tmp_path)
    faults = [f"kill@0:6:{point}" for point in points] + ([SLOWLY] if how == WRITES_ON else [])
    history = supervise(started_by, tmp_path, faults, overrides=[how], most_restarts=len(points))
    assert_recovered(history, golden, restarts=len(points), within_s=50.0 * (1 + len(points)))
    assert history.resumed == expected


def test_while_a_checkpoint_is_under_way_and_others_are_left_out(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden
) -> None:
    configure(tmp_path)
    most = 0

    def look(ranks: Ranks) -> None:
        nonlocal most
        most = max(most, len([*(tmp_path / "run/checkpoints").glob("*.tmp-*")]))

    faults = [PACE, "sleep@0:3:ckpt_commit:2.0", "kill@1:11:fwd"]
    killed = start(started_by, tmp_path, faults, meanwhile=look)
    assert most == 1
    assert "no checkpoint of step 6: the one before it is still being written; training goes on" in killed.said[0]
    assert directory.list_checkpoints(tmp_path / "run/checkpoints") == []
    again = supervise(started_by, tmp_path, faults[2:])
    history = History(tmp_path, [killed, *again.starts], again.wall_s)
    assert_recovered(history, golden)
    assert history.resumed == [0]


def test_what_hangs(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)
    history = supervise(started_by, tmp_path, ["hang@1:5:fwd", "gil@0:8:bwd", "hang@1:9:ckpt_write"])
    assert_recovered(history, golden, restarts=3, within_s=200.0)
    assert len(history.fired) == 3
    for hung in history.starts[:-1]:
        assert HangError.exit_code in hung.codes.values()


def test_twice_while_it_starts_again(started_by: ForkServerContext, tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)
    assert start(started_by, tmp_path, [PACE, "kill@1:8:fwd"]).code
    history = supervise(started_by, tmp_path, ["kill@0:0:load", "segv@1:0:load", "kill@1:8:data"])
    assert_recovered(history, golden, restarts=None)
    assert 2 <= len(history.starts) - 1 <= 3


@pytest.mark.parametrize("batch", [2, 4])
def test_fewer_ranks_and_then_as_many_as_before(started_by: ForkServerContext, tmp_path: Path, batch: int) -> None:
    """Of two summands the order does not matter; more are summed in the order that the ranks make, as floats round."""
    overrides = (f"train.global_batch={batch}",)
    configure(tmp_path / "golden")
    configure(tmp_path / "elastic")
    golden = Golden.of(supervise(started_by, tmp_path / "golden", overrides=overrides))
    folder = tmp_path / "elastic"
    history = History(folder)
    for world, fault in ((2, "kill@0:5:fwd"), (1, "term@0:8:fwd"), (2, "kill@1:12:opt"), (2, "kill@1:12:opt")):
        degree = f"parallel.dp={world}"
        history.starts.append(start(started_by, folder, [PACE, fault], overrides=(*overrides, degree), world=world))
    assert [actual.code not in {0, 75} for actual in history.starts] == [True, False, True, False], history.said
    actual, expected = course(history.run), golden.course
    assert [record["step"] for record in actual] == [record["step"] for record in expected]
    alike = len(expected) if batch == WORLD else history.starts[1].began_after
    assert actual[:alike] == expected[:alike]
    for a, b in zip(actual, expected, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-6 * b["loss"], (a, b)


def test_experts_divided_otherwise_at_each_start(started_by: ForkServerContext, tmp_path: Path) -> None:
    """Four ranks with all experts, with two, with two whose state is sharded, and with one."""
    shape = ("model.config.intermediate_size=9", "model.config.router_aux_loss_coef=0.1")
    overrides = (*EXPERTS, *shape, "parallel.dp=4", WAITS)
    configure(tmp_path / "golden")
    configure(tmp_path / "divided")
    whole = supervise(started_by, tmp_path / "golden", overrides=overrides, world=4)
    history = History(tmp_path / "divided")
    ways = [
        (1, "none", "kill@0:5:fwd"),
        (2, "none", "kill@1:8:bwd"),
        (2, "zero1", "kill@2:11:opt"),
        (4, "none", "sleep@0:1:fwd:0.01"),
    ]
    for ep, shard, fault in ways:
        how = (*overrides, f"parallel.ep={ep}", f"parallel.shard={shard}")
        history.starts.append(start(started_by, history.folder, [PACE, fault], overrides=how, world=4))
    assert [actual.code != 0 for actual in history.starts] == [True, True, True, False], history.said
    assert history.resumed == [3, 6, 9], "each start goes on from a checkpoint of another division"
    actual, expected = course(history.run), Golden.of(whole).course
    assert [record["step"] for record in actual] == [record["step"] for record in expected]
    for a, b in zip(actual, expected, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-6 * b["loss"], (a, b)
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-5 * b["grad_norm"], (a, b)
