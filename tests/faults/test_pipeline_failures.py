"""A pipeline stage that fails, is killed or hangs ends the run within seconds, and every rank says which stage it was.

Four processes run the command `nxtrain train` over gloo; the store in which they meet is held by this process, where
torchrun's agent holds it. What befalls a stage befalls it in the middle of the second step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from nxtrain.cli import main as cli
from nxtrain.errors import DataError, HangError
from nxtrain.parallel.pipeline import Pipeline
from nxtrain.parallel.schedule import Action
from nxtrain.train import run  # noqa: F401  # so that the processes need not import it
from tests.support.runs import token_file

STAGES, NUM_MICRO = 4, 4
AT = Action("backward", 0, 1)
ENDED_S = 10.0
"""Within which all must end after a failure; the bound is for busy machines, where Python itself takes seconds."""
PATIENCE_S = 4.0

CONFIG = """
[run]
dir = "{folder}/run"
[model]
preset = "tiny"
config.num_hidden_layers = {stages}
[train]
steps = 1000
seq_len = 16
global_batch = {num_micro}
micro_batch = 1
eval_every = 0
[parallel]
pp = {stages}
[data]
source = "tokens"
path = "{folder}/rows.npy"
[recovery]
hang_timeout_s = {patience_s}
[metrics]
progress = false
tensorboard = false
[backend]
name = "cpu"
"""


@dataclass(frozen=True)
class Fault:
    """What befalls a rank."""

    rank: int
    kind: str
    folder: Path

    def strike(self) -> None:
        """Fail; what others find is timed from here."""
        (self.folder / "struck").write_text(str(time.monotonic()), encoding="utf-8")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "hang":
            time.sleep(60)
        if self.kind == "data":
            raise DataError("a file is gone")
        raise ValueError("by this test")


def rank_process(rank: int, port: int, fault: Fault) -> None:
    """One rank of the command, with the fault in its pipeline."""
    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": STAGES, "LOCAL_WORLD_SIZE": STAGES}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in place.items()})
    log = os.open(fault.folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if rank == fault.rank:
        steps = 0
        wait_for = Pipeline._await

        def struck(self: Pipeline, action: Action, underway: Any) -> Any:
            nonlocal steps
            steps += action == AT
            if action == AT and steps == 2:
                fault.strike()
            return wait_for(self, action, underway)

        Pipeline._await = struck  # type: ignore[method-assign]
    sys.argv = ["nxtrain", "train", str(fault.folder / "config.toml")]
    cli.main()


@pytest.fixture(scope="module")
def context() -> Iterator[ForkServerContext]:
    """Starts processes that have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    yield context


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the seconds since the fault, what it printed."""

    code: int
    after_s: float
    said: str


def run_until_all_ended(context: ForkServerContext, fault: Fault, patience_s: float = 600.0) -> dict[int, Ended]:
    """How each rank ended."""
    folder = fault.folder
    token_file(folder / "rows.npy", 64)
    text = CONFIG.format(folder=folder, stages=STAGES, num_micro=NUM_MICRO, patience_s=patience_s)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    store = TCPStore("127.0.0.1", 0, STAGES, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=rank_process, args=(rank, store.port, fault)) for rank in range(STAGES)]
    ended_at: dict[int, float] = {}
    try:
        for process in processes:
            process.start()
        limit = time.monotonic() + 60
        while len(ended_at) < STAGES and time.monotonic() < limit:
            time.sleep(0.02)
            for rank, process in enumerate(processes):
                if not process.is_alive():
                    ended_at.setdefault(rank, time.monotonic())
    finally:
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    said = {rank: (folder / f"{rank}.log").read_text(encoding="utf-8") for rank in range(STAGES)}
    assert (folder / "struck").exists(), said
    assert not alive, (alive, said)
    struck = float((folder / "struck").read_text(encoding="utf-8"))
    return {rank: Ended(processes[rank].exitcode or 0, at - struck, said[rank]) for rank, at in ended_at.items()}


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_all_ranks_end_and_name_the_stage_that_failed(
    context: ForkServerContext, tmp_path: Path, stage: int, kind: str
) -> None:
    ended = run_until_all_ended(context, Fault(stage, kind, tmp_path))
    place = f"pipeline stage {stage} of {STAGES} (rank {stage})"
    first = ended.pop(stage)
    assert first.code == (1 if kind == "raise" else -signal.SIGKILL)
    if kind == "raise":
        assert (
            f"{place} failed in B1: ValueError: by this test" in first.said.splitlines()[-2]
        )  # before the note on defects
        assert "Traceback" in first.said
    for rank, one in ended.items():
        assert one.code == 1, one
        assert one.after_s < ENDED_S
        assert "Traceback" not in one.said
        told = one.said[one.said.index("error: ") :]
        words = f"{place} failed in B1: ValueError: by this test" if kind == "raise" else f"{place} is gone"
        assert told.startswith(f"error: rank {rank}: {words}"), told


def test_a_mistake_that_one_stage_finds_keeps_its_exit_code(context: ForkServerContext, tmp_path: Path) -> None:
    ended = run_until_all_ended(context, Fault(2, "data", tmp_path))
    assert [ended[rank].code for rank in range(STAGES)] == [1, 1, DataError.exit_code, 1]
    for rank in (0, 1, 3):
        expected = f"error: rank {rank}: pipeline stage 2 of 4 (rank 2) failed: DataError: a file is gone\n"
        assert expected in ended[rank].said


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_that_hangs_is_named_by_all_ranks(context: ForkServerContext, tmp_path: Path, stage: int) -> None:
    ended = run_until_all_ended(context, Fault(stage, "hang", tmp_path), PATIENCE_S)
    place = f"pipeline stage {stage} of {STAGES} (rank {stage})"
    assert len(ended) == STAGES
    for one in ended.values():
        assert one.code == HangError.exit_code
        assert PATIENCE_S * 0.9 < one.after_s < PATIENCE_S + ENDED_S
        assert "Traceback" not in one.said
        assert place in one.said[one.said.index("error: ") :].splitlines()[0], one.said
