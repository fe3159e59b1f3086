"""Ranks that are lost alone are replaced alone: the others keep their processes, and the run stays what it was."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR, STARTS_FILE, SUMMARY_FILE
from tests.faults.test_agent import Launched, launched
from tests.faults.test_data_faults import write_text
from tests.support import forked_python
from tests.support.command_ranks import write_config
from tests.support.deaf_device import HEARD, MUTANT
from tests.support.recovery import EVERY, PACE, STEPS, Golden, assert_tidy, tensors
from tests.support.runs import course

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds ranks in /proc, which Linux has; runs there"
)

IN_JOB = "recovery.in_job=true"
REPLACED = re.compile(r"lost ranks (.+) are replaced; ranks (.+) keep their processes")
RECALLED = re.compile(r"the state of step (\d+) comes from the memory of ranks (.+), not from a checkpoint")


class Watched:
    """A run whose processes are looked at until it ends; `how` is for `Launched`.

    Attributes:
        processes: Sets of the ranks' processes, in the order in which they were seen.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        faults: Sequence[str] = (),
        within_s: float = 100.0,
        **how: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        write_config(
            folder,
            steps=STEPS,
            every=EVERY,
            recovery={"hang_timeout_s": 20.0, "max_same_step": 0, "max_restarts": 20},
        )
        self.run, self.processes = folder / "run", list[set[int]]()
        with launched(folder, *overrides, faults=",".join((PACE, *faults)), **how) as run:
            for _ in range(int(within_s / 0.02)):
                if run.code(0.02) is not None:
                    break
                self._look(run)
            self.code, self.said = run.code(), run.said()

    def _look(self, run: Launched) -> None:
        try:
            now = {*run.ranks().values()}
        except OSError:  # the agent has just ended
            return
        if now and now not in self.processes:
            self.processes.append(now)

    @property
    def replaced(self) -> list[str]:
        return [lost for lost, _ in REPLACED.findall(self.said)]

    @property
    def recalled(self) -> list[int]:
        """Steps that the run went on from in memory."""
        return [int(step) for step, _ in RECALLED.findall(self.said)]

    @property
    def golden(self) -> Golden:
        found = course(self.run)
        newest = directory.step_path(self.run / CHECKPOINTS_DIR, found[-1]["step"])
        return Golden(found, tensors(newest))

    def assert_is(self, golden: Golden) -> None:
        assert self.code == 0, self.said
        assert self.golden == golden, self.said
        assert_tidy(self.run / CHECKPOINTS_DIR)

    def survivors(self, world: int) -> set[int]:
        """Processes that were there from the first to the last look at a whole world."""
        whole = [ranks for ranks in self.processes if len(ranks) == world]
        return whole[0].intersection(*whole)


def test_a_rank_that_is_killed_anywhere_is_replaced_and_the_other_goes_on(tmp_path: Path, golden: Golden) -> None:
    """In all parts of a step and of a checkpoint, in the first step, the last, and twice in one."""
    points = ("1:fwd", "3:reduce", "6:ckpt_write:4096", "8:fwd", "8:bwd", "12:opt")
    found = Watched(tmp_path, IN_JOB, "checkpoint.async=false", faults=[f"kill@1:{point}" for point in points])
    found.assert_is(golden)
    assert found.replaced == ["1"] * len(points)
    assert len(found.survivors(2)) == 1, "one process lives from the beginning to the end"
    killed = [int(point.partition(":")[0]) for point in points]
    late = [step - at for step, at in zip(found.recalled, killed, strict=True)]
    assert {*late} == {-1, 0}, "the other goes on from the step before, or from that of which it has all sums"


def test_rank_0_which_writes_the_files_is_replaced_as_any_other(tmp_path: Path, golden: Golden) -> None:
    points = ("2:bwd", "4:log", "6:ckpt_commit", "12:log")
    found = Watched(tmp_path, IN_JOB, "checkpoint.async=false", faults=[f"kill@0:{point}" for point in points])
    found.assert_is(golden)
    assert found.replaced == ["0"] * len(points)
    assert len(found.survivors(2)) == 1
    assert found.recalled[1] == 4, "the record of the step is made again, which the killed one was about to write"
    assert found.recalled[-1] == STEPS
    starts = [json.loads(line) for line in (found.run / LOGS_DIR / STARTS_FILE).read_text().splitlines()]
    assert starts[-1]["lost_steps"] == 0
    assert starts[-1]["restart_s"] > 0


def test_state_without_a_replica_comes_from_a_checkpoint_and_a_start_that_fails_is_made_by_all(tmp_path: Path) -> None:
    """Under ZeRO-1 each rank has a part of the optimizer's state alone. Rank 1 then dies while it loads."""
    how = ("parallel.shard=zero1", "checkpoint.async=false")
    golden = Watched(tmp_path / "golden", *how).golden
    found = Watched(tmp_path / "killed", *how, IN_JOB, faults=["kill@1:5:fwd", "kill@*:8:reduce"])
    found.assert_is(golden)
    assert found.replaced == ["1"], "after the second loss there is no survivor"
    assert not found.recalled
    assert found.said.count("continues after step 3\n") == found.said.count("continues after step 6\n") == 1


def test_an_evaluation_that_loses_a_rank_is_made_again(tmp_path: Path) -> None:
    how = (*write_text(tmp_path), "train.eval_every=3", "checkpoint.async=false")
    golden = Watched(tmp_path / "golden", *how).golden
    assert "val_loss" in golden.course[2]
    last = golden.course[-1]["step"]
    found = Watched(tmp_path / "killed", *how, IN_JOB, faults=["kill@1:3:eval", f"kill@0:{last}:eval"])
    found.assert_is(golden)
    assert found.recalled == [3, last]
    assert (found.run / SUMMARY_FILE).read_text() == (tmp_path / "golden/run" / SUMMARY_FILE).read_text()


ON_DEAF_DEVICES = {forked_python.FIRST: "tests.support.deaf_device:install"}


def test_a_device_that_waits_for_a_lost_rank_is_set_free_and_keeps_its_state(tmp_path: Path, golden: Golden) -> None:
    """The agent tells of the loss, since collectives of GPUs raise no error; a wait that is aborted has wrong sums."""
    how = (IN_JOB, "checkpoint.async=false", "backend.cpu_transport=gloo")
    points = ("2:fwd", "4:bwd", "5:reduce", "8:opt", "12:opt")
    found = Watched(tmp_path, *how, faults=[f"kill@1:{point}" for point in points], variables=ON_DEAF_DEVICES)
    found.assert_is(golden)
    assert found.replaced == ["1"] * len(points)
    assert len(found.survivors(2)) == 1
    assert found.said.count(HEARD) >= 3
    assert "lost ranks: 1" in found.said


def test_an_update_by_the_sums_of_an_aborted_wait_is_seen(tmp_path: Path, golden: Golden) -> None:
    how = (IN_JOB, "checkpoint.async=false", "backend.cpu_transport=gloo")
    variables = {**ON_DEAF_DEVICES, MUTANT: "1"}
    found = Watched(tmp_path, *how, faults=["kill@1:4:bwd"], variables=variables)
    assert found.code != 0 or found.golden != golden


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(3, "dp=3"), (4, "dp=2 tp=2"), (4, "dp=2 pp=2")], ids=lambda given: given[1])
def test_other_layouts(tmp_path: Path, degrees: tuple[int, str]) -> None:
    world, words = degrees
    batch = 6 if world == 3 else 4
    how = (f"train.global_batch={batch}", *(f"parallel.{word}" for word in words.split()))
    golden = Watched(tmp_path / "golden", *how).golden
    points = ("1:3:bwd", "0:5:reduce", f"{world - 1}:8:opt", "0:8:fwd", "1:12:log", "0:12:post_step")
    found = Watched(tmp_path / "killed", *how, IN_JOB, faults=[f"kill@{point}" for point in points])
    found.assert_is(golden)
    assert len(found.replaced) == len(found.recalled)
    assert len(found.survivors(world)) >= world - 3
