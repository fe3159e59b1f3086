"""Whatever is killed or hangs, and wherever: the run that is started again is the one that nothing befell, bit for bit.

What that means stands in `tests.support.recovery.assert_recovered`.
"""

from __future__ import annotations

import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
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
SLOWLY = "sleep@*:1:fwd:0.1"
"""So that every checkpoint is written before the next is due."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["fwd", "bwd", "reduce", "opt"])
def test_in_a_step(started_by: ForkServerContext, tmp_path: Path, golden: Golden, point: str, rank: int) -> None:
    configure(tmp_path)
    history = supervise(started_by, tmp_path, [f"kill@{rank}:8:{point}"])
    assert_recovered(history, golden)
    assert -signal.SIGKILL in history.starts[0].codes.values()
    assert history.starts[0].reached in {7, 8}  # reducing is done when the other is killed


def test_in_a_step_of_cut_state_in_bf16_rounded_at_random(started_by: ForkServerContext, tmp_path: Path) -> None:
    overrides = ("parallel.shard=zero1", "precision.params=bf16", "precision.update=bf16_stochastic")
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [WAITS, WRITES_ON])
def test_in_the_midst_of_a_file(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden, rank: int, how: str
) -> None:
    configure(tmp_path)
    pace = [SLOWLY] if how == WRITES_ON else []
    history = supervise(started_by, tmp_path, [f"kill@{rank}:6:ckpt_write:4096", *pace], overrides=[how])
    assert_recovered(history, golden)
    assert history.resumed == [3]


@pytest.mark.parametrize(
    ("point", "how", "expected"),
    [
        ("ckpt_stage", WAITS, 3),
        ("ckpt_fsync", WAITS, 3),
        ("ckpt_commit", WAITS, 3),
        ("ckpt_commit", WRITES_ON, 3),
        ("ckpt_rename", WAITS, 3),
        ("ckpt_latest", WAITS, 6),
        ("ckpt_latest", WRITES_ON, 6),
    ],
)
def test_between_the_parts_of_a_commit(
    started_by: ForkServerContext, tmp_path: Path, golden: Golden, point: str, how: str, expected: int
) -> None:
    configure(tmp_path)
    pace = [SLOWLY] if how == WRITES_ON else []
    history = supervise(started_by, tmp_path, [f"kill@0:6:{point}", *pace], overrides=[how])
    assert_recovered(history, golden)
    assert history.resumed == [expected]


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


@pytest.mark.parametrize("fault", ["hang@1:8:fwd", "gil@0:8:bwd", "hang@1:6:ckpt_write"])
def test_what_hangs(started_by: ForkServerContext, tmp_path: Path, golden: Golden, fault: str) -> None:
    configure(tmp_path)
    history = supervise(started_by, tmp_path, [fault])
    assert_recovered(history, golden)
    assert 7 in history.starts[0].codes.values()


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
    assert [found.code not in {0, 75} for found in history.starts] == [True, False, True, False], history.said
    found, expected = course(history.run), golden.course
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    alike = len(expected) if batch == WORLD else history.starts[1].began_after
    assert found[:alike] == expected[:alike]
    for a, b in zip(found, expected, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-6 * b["loss"], (a, b)
