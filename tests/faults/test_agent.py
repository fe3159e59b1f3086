"""`nxtrain launch` and its ranks when either is asked to stop, is killed, or finds no rendezvous."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.errors import BackendError, StoppedBySignal
from nxtrain.common.process.signals import STOPPING
from nxtrain.common.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from nxtrain.common.testing.fault_points import VARIABLE
from tests.support import forked_python
from tests.support.command_ranks import until, write_config
from tests.support.commands import OUTPUT, command
from tests.support.commands import start as start_command
from tests.support.processes import is_alive
from tests.support.recovery import Golden, History, Start, assert_recovered, configure
from tests.support.runs import course, saved_steps

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds ranks in /proc, which Linux has; runs there"
)


class Launched:
    """The command `nxtrain launch`, in a session of its own as in a terminal."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        faults: str = "",
        variables: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        ignores: Sequence[int] | None = None,
    ) -> None:
        self.folder, self.log = folder, folder / OUTPUT
        self.agent: Popen[bytes] | ForkServerProcess
        words, environ = ("launch", str(folder / "config.toml"), *overrides), {VARIABLE: faults, **(variables or {})}
        if ignores is None:
            self.agent = start_command(folder, *words, environ=environ, first=forked_python.command)
            return
        command = (*under, sys.executable, "-m", "nxtrain", *words)
        with self.log.open("w", encoding="utf-8") as log:
            # As nohup has it, or as a terminal has it, whatever these tests themselves were started to ignore.
            now = {number: signal.SIG_IGN if number in ignores else signal.SIG_DFL for number in (*STOPPING, *ignores)}
            before = {number: signal.signal(number, handler) for number, handler in now.items()}
            self.agent = Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **environ})
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def pid(self) -> int:
        return self.agent.pid or 0

    def code(self, within_s: float = 0.0) -> int | None:
        """Exit code once the agent has ended; None: it is alive."""
        if isinstance(self.agent, ForkServerProcess):
            self.agent.join(within_s)
            return self.agent.exitcode
        with suppress(TimeoutExpired):
            self.agent.wait(within_s)
        return self.agent.returncode

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def step(self) -> int:
        """The last step in the record; its line may be under way."""
        file = self.folder / "run" / METRICS_FILE
        lines = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def await_step(self, step: int) -> None:
        until(lambda: self.step() >= step, 120.0, self.said)

    def has_resumed(self, times: int) -> bool:
        return self.said().count("continues after step") == times

    def ranks(self) -> dict[int, int]:
        """Process of each rank: an agent starts them in their order."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return dict(enumerate(sorted(map(int, pids))))


@contextmanager
def launched(folder: Path, *overrides: str, **how: Any) -> Iterator[Launched]:
    """Start the command, and leave nothing of it behind; `how` is for `Launched`."""
    result = Launched(folder, *overrides, **how)
    ranks: dict[int, int] = {}
    try:
        yield result
        ranks = result.ranks() if result.code() is None else {}
    finally:
        result.agent.kill()
        result.code(10.0)
        for pid in filter(is_alive, ranks.values()):
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_once_stops_saves_and_ends_with_75(tmp_path: Path) -> None:
    """It reaches the whole process group, but of the ranks only through the agent."""
    write_config(tmp_path, every=1000)
    with launched(tmp_path, ignores=[]) as run:
        run.await_step(3)
        ranks = run.ranks()
        os.killpg(run.pid, signal.SIGINT)
        assert run.code(30) == StoppedBySignal.exit_code, run.said()
        assert not any(map(is_alive, ranks.values()))
    newest = directory.newest(tmp_path / "run" / CHECKPOINTS_DIR)
    assert newest == directory.step_path(tmp_path / "run" / CHECKPOINTS_DIR, course(tmp_path / "run")[-1]["step"])
    assert "Traceback" not in run.said()


@pytest.mark.parametrize(("under", "goes_on"), [((), False), (("nohup",), True)])
def test_a_terminal_that_is_closed_stops_a_run_unless_nohup_says_otherwise(
    tmp_path: Path, under: tuple[str, ...], goes_on: bool
) -> None:
    write_config(tmp_path, every=1000)
    with launched(
        tmp_path, "parallel.dp=1", under=under, ignores=[] if under else None
    ) as run:  # of several ranks, Ctrl-C is told
        run.await_step(3)
        os.killpg(run.pid, signal.SIGHUP)
        if goes_on:
            run.await_step(run.step() + 50)
            os.killpg(run.pid, signal.SIGTERM)
        assert run.code(30) == StoppedBySignal.exit_code, run.said()
    newest = directory.newest(tmp_path / "run" / CHECKPOINTS_DIR)
    assert newest == directory.step_path(tmp_path / "run" / CHECKPOINTS_DIR, course(tmp_path / "run")[-1]["step"])


def test_ranks_of_an_agent_that_was_killed_end_too(tmp_path: Path) -> None:
    write_config(tmp_path)
    with launched(tmp_path) as run:
        run.await_step(3)
        ranks = run.ranks()
        assert sorted(ranks) == [0, 1]
        run.agent.kill()
        until(lambda: not any(map(is_alive, ranks.values())), 60.0, run.said)
    assert "the agent that started it is gone" in run.said()


def test_the_same_command_goes_on_after_the_agent_and_all_ranks_were_killed(tmp_path: Path, golden: Golden) -> None:
    configure(tmp_path)
    with launched(tmp_path, faults="sleep@*:1:fwd:0.2") as run:
        run.await_step(4)
        pids = (run.pid, *run.ranks().values())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.code(10)
        assert len(pids) == 3
        assert run.step() < len(golden.course)
    with launched(tmp_path) as run:
        assert run.code(60) == 0, run.said()
        said = run.said()
    saved = tuple(saved_steps(tmp_path / "run"))
    done = Start({0: 0}, {0: said}, began_after=None, reached=saved[-1], saved=saved)
    assert_recovered(History(tmp_path, [done]), golden, restarts=0)


def test_restarts_are_counted_anew_when_a_run_gets_further(tmp_path: Path) -> None:
    """One restart is allowed, and two are needed; then a rank that is told to stop ends the whole run with 75."""
    write_config(tmp_path, every=5)
    with launched(tmp_path, "recovery.max_restarts=1") as run:
        run.await_step(6)
        for starts in (1, 2):
            time.sleep(1.2)  # the progress file is written once a second
            before = run.ranks()
            os.kill(before[1], signal.SIGKILL)
            until(partial(run.has_resumed, starts), 120.0, run.said)
            assert not {*before.values()} & {*run.ranks().values()}
            time.sleep(1.0)  # so that it gets further than before
        os.kill(run.ranks()[1], signal.SIGTERM)
        assert run.code(30) == StoppedBySignal.exit_code, run.said()
    steps = [record["step"] for record in course(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_one_rank_is_started_again_and_neither_requests_nor_hangups_end_it(tmp_path: Path) -> None:
    """Stacks are asked for from the first moment on, of the launcher and of the rank, and both are under `nohup`."""
    write_config(tmp_path, steps=12, every=4)
    faults = "sleep@0:1:fwd:0.05,kill@0:6:fwd"
    options = ("parallel.dp=1", "recovery.max_restarts=1")
    with launched(tmp_path, *options, faults=faults, ignores=[signal.SIGHUP, signal.SIGUSR2]) as run:
        limit = time.monotonic() + 90
        while run.code() is None:
            assert time.monotonic() < limit, run.said()
            for pid in (run.pid, *run.ranks().values()):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGUSR2)
                    os.kill(pid, signal.SIGHUP)
            time.sleep(0.5)  # each request is a small risk, see `stacks.answer_requests`
        assert run.code(10) == 0, run.said()
    assert "kill@0:6:fwd fires" in run.said()
    assert "continues after step 4\n" in run.said()
    assert [record["step"] for record in course(tmp_path / "run")] == [*range(1, 13)]


@contextmanager
def another_program() -> Iterator[int]:
    """The port of a server that has nothing to do with us, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("fault", ["port in use", "unknown name"])
def test_agents_that_cannot_meet_say_where_and_why(tmp_path: Path, fault: str) -> None:
    with another_program() as port:
        name = "127.0.0.1" if fault == "port in use" else "no-such-machine.invalid"
        where = f"{name}:{port}"
        options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}", "--rdzv-conf=read_timeout=3")
        code, output = command(tmp_path, *options, "-m", "nxtrain", "train", "none.toml", first=forked_python.agent)
    assert code == BackendError.exit_code, output
    last = [line for line in output.splitlines() if line.startswith("error: ")][-1]
    assert last.startswith(f"error: the agents of the run do not meet at {where}: "), output
    assert "Traceback" not in output
