"""A pipeline stage that fails, is killed or hangs ends the run within seconds, and every rank names the stage."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import DataError, HangError
from nxtrain.common.testing import fault_kinds
from nxtrain.parallel.pipeline import Pipeline
from nxtrain.parallel.schedule import Action
from tests.support.command_ranks import Ranks, until, write_config

STAGES = 4
AT = Action("backward", 0, 1)
ENDED_S = 10.0
"""Within which all must end after a failure; the bound is for busy machines, where Python itself takes seconds."""
PATIENCE_S = 4.0


def strike(rank: int, kind: str, folder: Path) -> None:
    """Arm a rank's pipeline: it fails in the middle of its second step."""
    if int(os.environ["RANK"]) != rank:
        return
    steps = 0
    wait_for = Pipeline._await

    def struck(self: Pipeline, action: Action, in_flight: Any) -> Any:
        nonlocal steps
        steps += action == AT
        if action == AT and steps == 2:
            (folder / "struck").touch()  # what others find is timed from here
            if kind == "data":
                raise DataError("a file is gone")
            fault_kinds.act(kind, (), ())
        return wait_for(self, action, in_flight)

    Pipeline._await = struck  # type: ignore[method-assign]


@dataclass(frozen=True)
class Ended:
    """End of a rank: its exit code, the seconds since the fault, and its output."""

    code: int
    after_s: float
    said: str


def run_until_all_ended(
    started_by: ForkServerContext, folder: Path, stage: int, kind: str, patience_s: float = 600.0
) -> dict[int, Ended]:
    """Ends of all ranks, of which one is struck."""
    write_config(
        folder,
        steps=1000,
        model={"preset": "tiny", "config": {"num_hidden_layers": STAGES}},
        parallel={"pp": STAGES},
        recovery={"hang_timeout_s": patience_s},
    )
    ended_at: dict[int, float] = {}

    def all_ended() -> bool:
        for rank, process in enumerate(ranks.processes):
            if not process.is_alive():
                ended_at.setdefault(rank, time.time())
        return len(ended_at) == STAGES

    with Ranks(started_by, folder, world=STAGES, first=partial(strike, stage, kind, folder)) as ranks:
        until(all_ended, 60.0, ranks.said)
    said, codes = ranks.said(), [process.exitcode or 0 for process in ranks.processes]
    struck = (folder / "struck").stat().st_mtime
    return {rank: Ended(codes[rank], at - struck, said[rank]) for rank, at in ended_at.items()}


@pytest.mark.parametrize("stage", [0, 1, STAGES - 1])
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_all_ranks_end_and_name_the_stage_that_failed(
    started_by: ForkServerContext, tmp_path: Path, stage: int, kind: str
) -> None:
    ended = run_until_all_ended(started_by, tmp_path, stage, kind)
    stage_of_rank = f"pipeline stage {stage} of {STAGES} (rank {stage})"
    first = ended.pop(stage)
    assert first.code == (1 if kind == "raise" else -signal.SIGKILL)
    if kind == "raise":
        assert (
            f"{stage_of_rank} failed in B1: InjectedError: injected failure" in first.said.splitlines()[-2]
        )  # before the note on defects
        assert "Traceback" in first.said
    for rank, one in ended.items():
        assert one.code == 1, one
        assert one.after_s < ENDED_S
        assert "Traceback" not in one.said
        output = one.said[one.said.index("error: ") :]
        words = (
            f"{stage_of_rank} failed in B1: InjectedError: injected failure"
            if kind == "raise"
            else f"{stage_of_rank} is gone"
        )
        assert output.startswith(f"error: rank {rank}: {words}"), output


def test_a_mistake_that_one_stage_finds_keeps_its_exit_code(started_by: ForkServerContext, tmp_path: Path) -> None:
    ended = run_until_all_ended(started_by, tmp_path, 2, "data")
    assert [ended[rank].code for rank in range(STAGES)] == [1, 1, DataError.exit_code, 1]
    for rank in (0, 1, 3):
        expected = f"error: rank {rank}: pipeline stage 2 of 4 (rank 2) failed: DataError: a file is gone\n"
        assert expected in ended[rank].said


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_that_hangs_is_named_by_all_ranks(started_by: ForkServerContext, tmp_path: Path, stage: int) -> None:
    ended = run_until_all_ended(started_by, tmp_path, stage, "hang", PATIENCE_S)
    stage_of_rank = f"pipeline stage {stage} of {STAGES} (rank {stage})"
    assert len(ended) == STAGES
    for one in ended.values():
        assert one.code == HangError.exit_code
        assert PATIENCE_S * 0.9 < one.after_s < PATIENCE_S + ENDED_S
        assert "Traceback" not in one.said
        assert stage_of_rank in one.said[one.said.index("error: ") :].splitlines()[0], one.said
