"""Two agents of one run, each for a node of its own: what becomes of both when parts of either stop or die."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NoReturn

import pytest

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import LATEST
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import StoppedBySignal
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.common.testing.fault_points import VARIABLE
from tests.support import forked_python
from tests.support.command_ranks import WORLD, until
from tests.support.commands import OUTPUT
from tests.support.commands import start as start_command
from tests.support.processes import free_port
from tests.support.recovery import (
    Golden,
    History,
    assert_recovered,
    configure,
    last_step,
    members,
    start,
    supervise,
    tensors,
)
from tests.support.runs import course

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds ranks in /proc, which Linux has; runs there"
)

PACE = "sleep@*:1:fwd:0.2"
WITHIN_S = 120.0

QUICKLY = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
"""Seconds for the last machines to join a rendezvous, by default 30, and until a silent machine is lost, else 15.

A busy machine stops an agent for a few seconds. A machine that is taken for lost then trains in a world of its own.
"""


def leave_late() -> None:
    """Be an agent whose rank outlasts the one with the store."""
    exit_now = os._exit

    def late(status: int) -> NoReturn:
        if "RANK" in os.environ:
            time.sleep(1.5)
        exit_now(status)

    os._exit = late
    forked_python.agent()


class Agents:
    """`nxtrain.launch.torchrun` for two nodes with a rank each; the first one holds the store in which they meet."""

    def __init__(self, folder: Path, *overrides: str, nodes: str = "2", patience_s: int = 60) -> None:
        self.folder, self._overrides, self._nodes, self._patience_s = folder, overrides, nodes, patience_s
        self._port, self._times = free_port(), 0
        self.agents = [self._start(0), self._start(1)]
        self._sessions = {agent.pid or 0 for agent in self.agents}

    def _start(self, number: int) -> ForkServerProcess:
        options = (
            *(
                f"--nnodes={self._nodes}",
                "--nproc-per-node=1",
                "--max-restarts=2",
                f"--local-addr=127.0.0.{number + 1}",
            ),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"),
            f"--rdzv-conf=is_host={1 - number},join_timeout={self._patience_s},{QUICKLY}",
        )
        self._times += 1
        start_folder = self.folder / f"agent{number}" / str(self._times)
        start_folder.mkdir(parents=True)
        train = ("-m", "nxtrain", "train", self.folder / "config.toml", *self._overrides)
        environ, first = {VARIABLE: PACE, "OMP_NUM_THREADS": "1"}, leave_late if number else forked_python.agent
        return start_command(start_folder, *options, *train, environ=environ, first=first)

    def start_again(self, number: int) -> None:
        """Start an agent again, as its supervisor would."""
        self.agents[number] = self._start(number)
        self._sessions.add(self.agents[number].pid or 0)

    def rank(self, number: int) -> int:
        pid = self.agents[number].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def kill_node(self, number: int) -> None:
        for pid in (self.agents[number].pid or 0, self.rank(number)):
            os.kill(pid, signal.SIGKILL)
        self.agents[number].join()

    def await_step(self, step: int) -> None:
        until(lambda: last_step(self.folder) >= step, WITHIN_S, self.said)

    def ended(self) -> list[int | None]:
        until(lambda: not any(agent.is_alive() for agent in self.agents), WITHIN_S, self.said)
        return [agent.exitcode for agent in self.agents]

    def said(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted(self.folder.glob(f"agent*/*/{OUTPUT}")))

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.join()
        until(lambda: not members(self._sessions), WITHIN_S, self.said)


@contextmanager
def agents(folder: Path, *overrides: str, nodes: str = "2", patience_s: int = 60) -> Iterator[Agents]:
    """Start both, and leave nothing of them behind."""
    result = Agents(folder, *overrides, nodes=nodes, patience_s=patience_s)
    try:
        yield result
    finally:
        result.kill()


def test_a_rank_dies_then_the_node_with_the_store_and_the_run_goes_on_until_one_agent_is_told_to_stop(
    tmp_path: Path, golden: Golden, started_by: ForkServerContext
) -> None:
    """It goes back on purpose, to the start: what is started again goes on from what the run itself has reached."""
    configure(tmp_path, patience_s=30.0)
    with agents(tmp_path, "checkpoint.resume=never") as run:
        run.await_step(4)
        latest = tmp_path / "run" / CHECKPOINTS_DIR / LATEST  # a save ends some steps later where the machine is busy
        until(latest.exists, WITHIN_S, run.said)
        os.kill(run.rank(1), signal.SIGKILL)
        run.await_step(5)
        until(lambda: run.said().count("continues after step") == 1, WITHIN_S, run.said)
        run.await_step(7)
        run.kill_node(0)
        until(lambda: "waiting for it to be started again" in run.said(), WITHIN_S, run.said)
        assert run.agents[1].is_alive()
        run.start_again(0)
        until(lambda: run.said().count("continues after step") == 2, WITHIN_S, run.said)
        run.await_step(8)
        os.kill(run.agents[1].pid or 0, signal.SIGTERM)
        assert run.ended() == [StoppedBySignal.exit_code] * 2, run.said()
        stopped = last_step(tmp_path)
        assert f"stopped after step {stopped}, whose checkpoint is saved" in run.said()
    assert stopped < len(golden.course)
    done = start(started_by, tmp_path)
    assert done.began_after == stopped
    assert_recovered(History(tmp_path, [done]), golden, restarts=0)


def test_an_agent_whose_partner_does_not_come_back_says_so_and_ends_as_after_a_crash(tmp_path: Path) -> None:
    configure(tmp_path, steps=1000, patience_s=30.0)
    with agents(tmp_path, patience_s=6) as run:
        run.await_step(2)
        run.kill_node(1)
        assert run.ended()[0] == 1, run.said()
        said = run.said()
    assert "waiting at 127.0.0.1:" in said
    assert "error: agents of other machines are gone, and did not come back in 6 seconds" in said
    assert "Traceback" not in said


def test_an_elastic_run_shrinks_to_one_node_and_grows_again_and_trains_on_the_same_samples(
    tmp_path: Path, started_by: ForkServerContext
) -> None:
    """Of two summands the order does not matter, so that the losses of one rank are those of two, bit for bit."""
    batch = f"train.global_batch={WORLD}"
    steps = 60  # the node has to be back before the other one has done them all alone
    configure(tmp_path / "golden", steps=steps)
    golden = Golden.of(supervise(started_by, tmp_path / "golden", overrides=[batch]))
    folder = tmp_path / "elastic"
    configure(folder, steps=steps, patience_s=30.0)
    with agents(folder, batch, "parallel.dp=0", nodes=f"1:{WORLD}") as run:
        run.await_step(4)
        run.kill_node(1)
        until(lambda: run.said().count("continues after step") == 1, WITHIN_S, run.said)
        alone = last_step(folder)
        run.await_step(alone + 1)
        run.start_again(1)
        until(lambda: run.said().count("; 2 ranks: tp 1, dp 2") == 2, WITHIN_S, run.said)
        assert run.ended() == [0, 0], run.said()
        worlds = set(re.findall(r"; (\d) ranks: tp 1, dp (\d)", run.said()))
        assert worlds == {("1", "1"), ("2", "2")}
    assert course(folder / "run") == golden.course
    newest = directory.step_path(folder / "run" / CHECKPOINTS_DIR, golden.course[-1]["step"])
    assert tensors(newest) == golden.tensors
    assert read_meta(newest).samples == len(golden.course) * WORLD
