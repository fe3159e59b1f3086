"""Ranks on XLA devices that are killed, stopped, hang or find numbers that go wrong: whole commands, started again."""

from __future__ import annotations

import json
import re
import signal
from functools import cache, partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import HangError, LostPeerError, RestartError, StoppedBySignal
from tests.support.recovery import Golden, History, assert_recovered, configure, supervise, tensors
from tests.support.runs import course
from tests.support.xla_processes import compiled, context, link

PATIENCE_S = 2.0

WITHIN_S = 200.0
"""For some starts, each of which compiles."""

EVERY_STEP = ("checkpoint.every=1", "checkpoint.async=false")


class Runs:
    def __init__(self, started_by: ForkServerContext, folder: Path) -> None:
        self._started_by, self._folder = started_by, folder

    def run(self, folder: Path, world: int, *faults: str, overrides: tuple[str, ...] = ()) -> History:
        """Start a run until it is done; `counted` tells of the last start what rank 0 compiled."""
        configure(folder, patience_s=PATIENCE_S)
        fixed = ("backend.name=xla", f"parallel.dp={world}", "model.config.num_hidden_layers=1")
        settings = (*fixed, "compile.max_recompiles=0", "checkpoint.keep=100", *overrides)
        first = partial(link, folder / "counted")
        return supervise(self._started_by, folder, faults, overrides=settings, world=world, first=first)

    @cache  # noqa: B019  (lives as long as this module)
    def golden(self, world: int) -> tuple[Golden, int]:
        """Run without faults on so many ranks, and the number of graphs of a rank."""
        folder = self._folder / str(world)
        return Golden.of(self.run(folder, world)), compiled(folder / "counted")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(context(), tmp_path_factory.mktemp("golden"))


def test_a_rank_that_is_killed_stopped_and_hangs_loses_nothing(runs: Runs, tmp_path: Path) -> None:
    history = runs.run(tmp_path, 1, "kill@0:5:opt", "term@0:8:fwd", "hang@0:11:bwd")
    assert_recovered(history, runs.golden(1)[0], restarts=3, within_s=WITHIN_S)
    codes = [start.code for start in history.starts]
    assert codes == [128 + signal.SIGKILL, StoppedBySignal.exit_code, HangError.exit_code, 0]
    first, stopped, last = history.resumed
    assert first == 3
    assert stopped in {8, 9, 10}, "the rank may begin further steps before its watchdog learns of the signal"
    assert last == max(9, stopped)
    said = history.starts[2].said[0]
    message = f"rank 0 did not get on within recovery.hang_timeout_s={PATIENCE_S:g} seconds: step 11 (training) for "
    assert message in said
    for stacks in (said, (history.run / "logs/hang-rank-0.txt").read_text(encoding="utf-8")):
        assert "in _hang" in stacks
        assert "in train_step" in stacks


def test_ranks_that_are_killed_stopped_and_frozen_lose_nothing(runs: Runs, tmp_path: Path) -> None:
    history = runs.run(tmp_path, 2, "kill@1:5:reduce", "term@1:8:fwd", "stop@1:12:fwd")
    assert_recovered(history, runs.golden(2)[0], restarts=3, within_s=WITHIN_S)
    killed, stopped, frozen, _ = history.starts
    assert killed.codes[1] == -signal.SIGKILL
    assert set(stopped.codes.values()) == {StoppedBySignal.exit_code}, "rank 0 was not sent the signal"
    assert "SIGTERM at rank 1: the run stops at the end of this step" in stopped.said[0]
    assert stopped.reached == stopped.saved[-1] == frozen.began_after
    assert frozen.codes[0] == HangError.exit_code
    assert f"rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds" in frozen.said[0]
    assert "and gives no sign of life" in frozen.said[0]
    # Rank 0 waits on the device; in the first steps after a start it waits for the comparison of graphs.
    stacks = (history.run / "logs/hang-rank-0.txt").read_text(encoding="utf-8")
    assert "in _brought" in stacks or "in compare" in stacks, stacks


def test_a_rank_that_ends_is_no_hang_and_a_bit_of_one_replica_is_found(runs: Runs, tmp_path: Path) -> None:
    faults = ("raise@1:1:fwd", "kill@1:2:fwd", "flip@1:5:post_step")
    history = runs.run(tmp_path, 2, *faults, overrides=("recovery.vote_every=5",))
    assert_recovered(history, runs.golden(2)[0], restarts=3, within_s=WITHIN_S)
    failed, killed, flipped, _ = history.starts
    assert failed.codes[0] == killed.codes[0] == LostPeerError.exit_code
    assert (
        "error: rank 0: rank 1 failed: InjectedError: injected failure\nrank 0 needs it, and ends too" in failed.said[0]
    )
    # Where rank 0 was at that moment decides how much it knows.
    assert re.search("error: rank 0: (rank 1|another rank of this rank's process group) is gone", killed.said[0])
    assert set(flipped.codes.values()) == {RestartError.exit_code}
    for message in flipped.said.values():
        assert "step 5: the replicas of the model are no longer equal: ranks 0 and 1 differ in model.embed" in message
        assert "was named" not in message, "not before"


@pytest.mark.parametrize(("world", "faults"), [(1, ("nan@0:8:reduce",)), (2, ("nan@1:8:reduce", "inf@0:8:bwd"))])
def test_a_step_that_is_not_finite_changes_no_bit_and_compiles_nothing(
    runs: Runs, tmp_path: Path, world: int, faults: tuple[str, ...]
) -> None:
    history = runs.run(tmp_path, world, *faults, overrides=("recovery.non_finite=skip", *EVERY_STEP))
    assert [start.code for start in history.starts] == [0], history.said
    before, bad, after = (weights(history, step) for step in (7, 8, 9))
    assert before == bad
    assert bad.keys() == after.keys()
    assert all(bad[name] != after[name] for name in bad if "exp_avg" in name)
    golden, graphs = runs.golden(world)
    assert course(history.run)[:7] == golden.course[:7]
    assert course(history.run)[7]["skipped_steps"] == [8]
    assert compiled(tmp_path / "counted") == graphs


def test_a_bad_step_is_rolled_back_and_fine_when_it_was_the_machine(runs: Runs, tmp_path: Path) -> None:
    history = runs.run(tmp_path, 1, "nan@0:8:reduce", overrides=("recovery.non_finite=rollback",))
    golden, graphs = runs.golden(1)
    assert_recovered(history, golden)
    assert history.starts[0].code == RestartError.exit_code
    assert history.resumed == [6]
    assert compiled(tmp_path / "counted") == graphs
    lines = (history.run / "logs/non_finite.jsonl").read_text(encoding="utf-8").splitlines()
    assert [(line["step"], line["verdict"]) for line in map(json.loads, lines)] == [
        (8, "rolled_back"),
        (8, "transient"),
    ]


def weights(history: History, step: int) -> dict[str, bytes]:
    return tensors(directory.step_path(history.checkpoints, step))
