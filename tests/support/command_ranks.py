"""Ranks of the command `nxtrain train` over gloo, as processes that need not import anything.

This process holds the store in which they meet, as torchrun's agent does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from nxtrain.common.run_folder import METRICS_FILE
from nxtrain.common.testing.fault_points import VARIABLE
from nxtrain.launch.local import AGENT
from tests.support import commands, runs
from tests.support.launch_cases import local_command
from tests.support.processes import AGENT_STORE, prepared, rank_variables

WORLD = 2


def write_config(folder: Path, *, steps: int = 100_000, every: int = 0, **sections: Mapping[str, Any]) -> Path:
    """A run of two ranks on random rows, every step logged, which no watchdog ends; `sections` override its tables."""
    tables: dict[str, Mapping[str, Any]] = {
        "train": {"steps": steps, "global_batch": 4},
        "parallel": {"dp": WORLD},
        "checkpoint": {"every": every},
        "recovery": {"hang_timeout_s": 600.0},
    }
    return runs.write_toml(folder, num_rows=64, **{**tables, **sections})


class Ranks:
    """Processes of a run whose configuration lies in a folder; as a context, which leaves none behind."""

    def __init__(
        self,
        started_by: ForkServerContext,
        folder: Path,
        *faults: str,
        overrides: Sequence[str] = (),
        world: int = WORLD,
        first: Callable[[], object] | None = None,
        config: Path | None = None,
    ) -> None:
        self._store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self.folder, self.world = folder, world
        for rank in range(world):
            self._log(rank).unlink(missing_ok=True)
        argv = ("train", str(config or folder / runs.FILE), *overrides)
        shared = {**AGENT_STORE, VARIABLE: ",".join(faults)}
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            environ = {**shared, **rank_variables(rank, world, self._store.port)}
            self.processes.append(prepared(started_by, self._log(rank), commands.play, argv, environ, first))

    def __enter__(self) -> Ranks:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks; one that has ended meanwhile is past it."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, number)

    def ended(self, *ranks: int, within_s: float = 120.0) -> dict[int, int | None]:
        """The exit codes of some ranks, or of all, once they have ended."""
        wanted = ranks or range(self.world)
        until(lambda: not any(self.processes[rank].is_alive() for rank in wanted), within_s, self.said)
        return {rank: self.processes[rank].exitcode for rank in wanted}

    def said(self) -> Mapping[int, str]:
        return {rank: self._log(rank).read_text() if self._log(rank).exists() else "" for rank in range(self.world)}

    def await_steps(self, number: int) -> None:
        """Wait until so many steps are in the record."""
        file = self.folder / "run" / METRICS_FILE
        until(lambda: file.exists() and file.read_text().count("\n") >= number, 120.0, self.said)

    def _log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"


def train_as_launched(
    started_by: ForkServerContext, folder: Path, config: Path, overrides: Sequence[str], *, within_s: float = 100.0
) -> str:
    """Train by the command and the environment that `nxtrain launch` renders, without their imports."""
    rendered = local_command(config, overrides, None, os.environ)
    train = ("-m", "nxtrain", "train", str(config), *overrides)
    before = rendered.argv[: -len(train)]
    assert (*before, *train) == rendered.argv
    (world,) = (int(word.partition("=")[2]) for word in before if word.startswith("--nproc-per-node="))
    assert before[1:3] == AGENT
    assert rendered.env.keys() <= {"OMP_NUM_THREADS"}, "each rank has one thread here"
    with Ranks(started_by, folder, overrides=overrides, world=world, config=config) as ranks:
        codes, said = ranks.ended(within_s=within_s), ranks.said()
    assert set(codes.values()) == {0}, said
    return said[0]


def until(condition: Callable[[], object], within_s: float, said: Callable[[], object]) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, said()
        time.sleep(0.02)
