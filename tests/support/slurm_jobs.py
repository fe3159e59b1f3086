"""Runs that are submitted to a Slurm cluster of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support import slurm
from tests.support.command_ranks import until
from tests.support.recovery import Golden, History, Start, assert_recovered, last_step

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.sbatch"
PACE = "sleep@*:1:fwd:0.3"
WITHIN_S = 120.0

_MISSING = slurm.missing()
# The reason names the packages or the rights that this machine lacks, and where the tests run.
needs_slurm = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)
"""Mark of the tests that start a cluster."""


class Job:
    """A run that was submitted."""

    def __init__(self, cluster: slurm.Cluster, folder: Path, number: int) -> None:
        self.cluster, self.folder, self.number = cluster, folder, number

    @staticmethod
    def submitted(cluster: slurm.Cluster, folder: Path, *argv: str, nodes: int = 1) -> Job:
        """One that `scripts/train.sbatch` runs."""
        options = (f"--nodes={nodes}", f"--output={folder / 'job.log'}", "--time=10")
        environ = {"NXTRAIN_FAULTS": PACE, "OMP_NUM_THREADS": "1"}
        return Job(cluster, folder, cluster.submit(*options, SCRIPT, folder / "config.toml", *argv, environ=environ))

    def said(self) -> str:
        log = self.folder / "job.log"
        return log.read_text(encoding="utf-8") if log.exists() else ""

    def await_step(self, step: int) -> None:
        until(lambda: last_step(self.folder) >= step, WITHIN_S, self._all)

    def await_restart(self, times: int) -> None:
        """Wait until Slurm has queued it again so many times, and nothing of the start before is left."""
        until(self._is_queued_again(times), WITHIN_S, self._all)

    def _is_queued_again(self, times: int) -> Callable[[], bool]:
        return lambda: self.state("Restarts") == str(times) and self.state("JobState") in {"PENDING", "RUNNING"}

    def await_end(self) -> str:
        """State at the end of the job, with its exit code."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.state("JobState") in over, WITHIN_S, self._all)
        return f"{self.state('JobState')} {self.state('ExitCode')}"

    def state(self, key: str) -> str:
        return self.cluster.job(self.number)[key]

    def _all(self) -> object:
        return self.cluster.job(self.number), self.said(), self.cluster.said()

    def remove(self) -> None:
        """Leave nothing of it on the cluster."""
        self.cluster.ask("scancel", "--signal=KILL", "--full", str(self.number))
        self.cluster.ask("scancel", str(self.number))

    @property
    def resumed(self) -> list[int]:
        """The steps after which its starts went on, but for what started from scratch."""
        return [int(step) for step in re.findall(r"continues after step (\d+)", self.said())]

    def assert_recovered(self, golden: Golden) -> None:
        """The oracle of runs that were broken."""
        saved = tuple(
            directory.step_of(path) for path in directory.list_checkpoints(self.folder / "run" / CHECKPOINTS_DIR)
        )
        done = Start({0: 0}, {0: self.said()}, began_after=None, reached=saved[-1], saved=saved)
        assert_recovered(History(self.folder, [done]), golden, restarts=0)
