"""Ranks of the command `nxtrain train` over gloo, as processes that need not import anything.

This process holds the store in which they meet, as torchrun's agent does. What befalls a rank befalls it while it reads
the batch of a step.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore

from nxtrain.checkpoint import directory
from nxtrain.cli import main as cli
from nxtrain.data.loader import Batch, Loader
from nxtrain.process.signals import STOPPING
from nxtrain.run_folder import METRICS_FILE
from nxtrain.train import run  # noqa: F401  # so that the processes need not import it
from tests.support.runs import token_file

WORLD = 2

CONFIG = """
[run]
dir = "{folder}/run"
[model]
preset = "tiny"
[train]
steps = {steps}
seq_len = 16
global_batch = 4
micro_batch = 1
eval_every = 0
[parallel]
dp = 2
[checkpoint]
every = {every}
[data]
source = "tokens"
path = "{folder}/rows.npy"
[recovery]
hang_timeout_s = {patience_s}
[metrics]
log_every = 1
progress = false
tensorboard = false
[backend]
name = "cpu"
"""


@dataclass(frozen=True)
class Fault:
    """Trouble of one rank, or of all.

    Args:
        kind: `sleep`, `gil`, `stop`, `raise`, `slow` (each batch from there on takes longer), `slow save`.
        step: Whose batch is being read.
        rank: Which one; None: all.
        seconds: That a slow batch takes longer.
    """

    kind: str
    step: int = 0
    rank: int | None = None
    seconds: float = 0.05

    def strike(self, folder: Path) -> None:
        """Befall this process."""
        if self.kind == "slow":
            time.sleep(self.seconds)
            return
        (folder / "struck").write_text(str(time.monotonic()), encoding="utf-8")
        if self.kind == "sleep":
            time.sleep(60)
        elif self.kind == "gil":
            ctypes.PyDLL(None).sleep(60)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise ValueError("by this test")


def write_config(folder: Path, *, steps: int = 100_000, every: int = 0, patience_s: float = 600.0) -> Path:
    """A run of two ranks on random rows, every step logged."""
    token_file(folder / "rows.npy", 64)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, steps=steps, every=every, patience_s=patience_s), encoding="utf-8")
    return path


def context() -> ForkServerContext:
    """Starts processes that have imported everything."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__])
    return found


def heed_signals() -> None:
    """Heed all signals, as under a terminal, whatever these tests were started to ignore."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


class Ranks:
    """Processes of a run whose configuration lies in a folder; as a context, which leaves none behind.

    Args:
        started_by: Starts them.
        folder: Has their configuration, what they print, and the run.
        fault: What befalls them by this module's means.
        injected: The value of `NXTRAIN_FAULTS`.
        overrides: Of the configuration, as on the command line.
        world: How many there are.
        first: Is called in each before the command, and must be known by a module's name.
    """

    def __init__(
        self,
        started_by: ForkServerContext,
        folder: Path,
        fault: Fault | None = None,
        *,
        injected: str = "",
        overrides: Sequence[str] = (),
        world: int = WORLD,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self.folder, self.world = folder, world
        for rank in range(world):
            self._log(rank).unlink(missing_ok=True)
        metrics = folder / "run" / METRICS_FILE
        self._lines_before = metrics.read_text().count("\n") if metrics.exists() else 0
        place: dict[str, object] = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": "True", "NXTRAIN_FAULTS": injected}
        self.processes: list[BaseProcess] = [
            started_by.Process(
                target=_rank,
                args=(folder, place | {"RANK": rank, "LOCAL_RANK": rank}, fault, tuple(overrides), first),
            )
            for rank in range(world)
        ]

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

    def ended(self, *ranks: int, within_s: float = 40.0) -> dict[int, int | None]:
        """The exit codes of some ranks, or of all, once they have ended."""
        wanted = ranks or range(self.world)
        until(lambda: not any(self.processes[rank].is_alive() for rank in wanted), within_s, self.said)
        return {rank: self.processes[rank].exitcode for rank in wanted}

    def said(self) -> Mapping[int, str]:
        """Output of each rank."""
        return {rank: self._log(rank).read_text() if self._log(rank).exists() else "" for rank in range(self.world)}

    def await_steps(self, number: int) -> None:
        """Wait until so many steps are in the record."""
        file = self.folder / "run" / METRICS_FILE
        until(lambda: file.exists() and file.read_text().count("\n") >= number, 40.0, self.said)

    def _log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"


def until(condition: Callable[[], object], within_s: float, said: Callable[[], object]) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: It does not come true in time.
    """
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, said()
        time.sleep(0.02)


def _rank(
    folder: Path,
    place: Mapping[str, object],
    fault: Fault | None,
    overrides: Sequence[str],
    first: Callable[[], object] | None,
) -> None:
    os.setsid()  # so that whatever it may start is known by its session
    heed_signals()
    os.environ.update({name: str(value) for name, value in place.items()})
    rank = int(os.environ["RANK"])
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if first is not None:
        first()
    if fault is not None and fault.rank in {None, rank}:
        _arm(fault, folder)
    sys.argv = ["nxtrain", "train", str(folder / "config.toml"), *overrides]
    cli.main()


def _arm(fault: Fault, folder: Path) -> None:
    if fault.kind == "slow save":
        publish = directory.publish

        def slowly(staged: Path, path: Path) -> None:
            (folder / "saving").touch()
            time.sleep(3.0)
            publish(staged, path)

        directory.publish = slowly
        return
    read = Loader.batch

    def struck(self: Loader, step: int) -> Batch:
        if step == fault.step or (fault.kind == "slow" and step > fault.step):
            fault.strike(folder)
        return read(self, step)

    Loader.batch = struck  # type: ignore[method-assign]
