"""The agent that starts the ranks ends as the rank that failed did."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError, DataError, DivergedError, HangError, StoppedBySignal
from nxtrain.config.load import load
from nxtrain.launch.debug import agent_settings
from nxtrain.launch.torchrun import exit_code_of
from tests.support.ranks import context

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"

RANK = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    time.sleep(60)
"""


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def launched(folder: Path, text: str, *argv: object, nproc: int = 2, options: Sequence[str] = ()) -> Ended:
    """The end of ranks that run a script under our agent, a process that need not import torch."""
    script, files = folder / "rank.py", (folder / "stdout", folder / "stderr")
    script.write_text(text, encoding="utf-8")
    how = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}", *options)
    agent = context().Process(target=run_agent, args=(files, [*how, str(script), *map(str, argv)]))
    agent.start()
    agent.join(100)
    is_alive = agent.is_alive()
    agent.kill()
    agent.join()
    said = [file.read_text(encoding="utf-8") for file in files]
    assert not is_alive, said
    assert agent.exitcode is not None
    return Ended(agent.exitcode, *said)


def run_agent(files: Sequence[Path], argv: Sequence[str]) -> None:
    """Become the agent, with what it prints in files."""
    for number, path in enumerate(files, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_DFL)  # whatever these tests were started to ignore
    sys.argv = ["nxtrain.launch.torchrun", *argv]
    sys.modules.pop(sys.argv[0], None)  # imported for `blame`
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def test_the_exit_code_of_a_rank_is_that_of_the_command_and_a_failure_is_in_the_log(tmp_path: Path) -> None:
    for code in (0, DivergedError.exit_code):
        done = launched(tmp_path, RANK, code)
        assert done.returncode == code
        assert (f"failed (exitcode: {code})" in done.stderr) == (code != 0)


SAYS = """
import os, sys
from pathlib import Path
from nxtrain.config.load import load
from nxtrain.launch.debug import open_debug_folder
note = open_debug_folder(load(Path(sys.argv[1]), sys.argv[2:]).config, is_alone=False)
sys.stderr.write(f"lines of {os.environ['RANK']} {note}\\n")
"""
"""Ranks run unbuffered, so that `print` writes a line in pieces, between which torch's reader of the log may come."""


@pytest.mark.parametrize("wanted", [True, False])
def test_with_debugging_each_rank_has_a_file_of_its_lines_beside_the_terminal(tmp_path: Path, wanted: bool) -> None:
    run = (str(DEMO), f"run.dir={tmp_path / 'run'}", "recovery.debug=dist")
    options, _ = agent_settings(load(DEMO, run[1:]).config, {})
    done = launched(tmp_path, SAYS, *run, options=options if wanted else ())
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "run/logs/dist").glob("*/attempt_0/*/stderr.log"))
    assert len(files) == (2 if wanted else 0)
    where = "the lines of each rank are in" if wanted else "the lines of all ranks share one standard error"
    for rank in range(2):
        assert f"lines of {rank} recovery.debug=dist: {where}" in done.stderr
    for rank, file in enumerate(files):
        assert file.read_text(encoding="utf-8").startswith(f"lines of {rank} ")


STOPPING = """
import os, signal, sys, time
signal.signal(int(sys.argv[2]), lambda *_: sys.exit(int(sys.argv[1])))
if os.environ["RANK"] == "1":
    open(sys.argv[3], "x").close()
else:
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.05)
    os.kill(os.getppid(), int(sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_no_failure_in_the_log(tmp_path: Path, number: signal.Signals) -> None:
    done = launched(tmp_path, STOPPING, StoppedBySignal.exit_code, int(number), tmp_path / "there")
    assert (done.returncode, done.stdout, done.stderr) == (StoppedBySignal.exit_code, "", "")


LOSING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
time.sleep(1.5)
print("lost rank 1")
"""


@pytest.mark.parametrize(("code", "said"), [(1, "lost rank 1\n"), (DataError.exit_code, "")])
def test_ranks_may_say_whom_they_lost_unless_it_has_said_all(tmp_path: Path, code: int, said: str) -> None:
    """torch ends them about a tenth of a second after another failed."""
    done = launched(tmp_path, LOSING, code)
    assert (done.returncode, done.stdout) == (code, said)


@pytest.mark.parametrize(("code", "starts"), [(DivergedError.exit_code, 1), (HangError.exit_code, 3)])
def test_what_no_restart_mends_ends_at_once(tmp_path: Path, code: int, starts: int) -> None:
    text = "import sys\nprint('started', flush=True)\nsys.exit(int(sys.argv[1]))\n"
    done = launched(tmp_path, text, code, nproc=1, options=["--max-restarts=2"])
    assert (done.returncode, done.stdout.count("started")) == (code, starts)


KILLED = "import os, signal, sys; sys.exit(1) if os.environ['RANK'] == '0' else os.kill(os.getpid(), signal.SIGKILL)"


def test_a_rank_that_is_killed_cannot_say_so_and_the_launcher_does(tmp_path: Path) -> None:
    done = launched(tmp_path, KILLED)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: rank 1: ended by SIGKILL"
    ]


def test_a_mistake_that_one_rank_finds_reaches_the_shell(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    overrides = (f"run.dir={tmp_path / 'run'}", "data.source=text", f"data.path={missing}")
    command = (sys.executable, "-m", "nxtrain", "launch", str(DEMO), *overrides)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == DataError.exit_code
    assert f"error: rank 0: data.path={missing} does not exist" in done.stderr
    assert "Traceback" not in done.stderr


LEAVING = """
import pathlib
import torch
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.mesh import Mesh

def num_threads():
    return len(list(pathlib.Path("/proc/self/task").iterdir()))

before, backend = num_threads(), CpuBackend()
mesh = Mesh.build(2, backend.rank, pp=2)
backend.lay_out(mesh)
backend.collectives.exchange(torch.ones(1), mesh.pp, 1 - mesh.pp.rank)
assert num_threads() > before
backend.close()
assert num_threads() == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
def test_no_thread_of_a_group_is_left_when_a_rank_ends(tmp_path: Path) -> None:
    """One that is would be torn down with the interpreter, and now and then abort the process of a finished run."""
    done = launched(tmp_path, LEAVING)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("exit_codes", "code"),
    [
        ([1, DataError.exit_code, -15], DataError.exit_code),
        ([-15, 1], 1),
        ([-9, -15], 137),
    ],
)
def test_the_code_that_tells_most_wins(exit_codes: list[int], code: int) -> None:
    assert exit_code_of(exit_codes) == code


def _isolates() -> bool:
    """True on a machine that makes network namespaces, in a new one of which the loopback interface is down."""
    tried = (
        subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    )
    return tried is not None and tried.returncode == 0


@pytest.mark.skipif(not _isolates(), reason="needs root and unshare(1), to start where no loopback interface is up")
def test_ranks_of_a_machine_without_a_loopback_interface_are_not_waited_for(tmp_path: Path) -> None:
    overrides = (f"run.dir={tmp_path / 'run'}",)
    command = ("unshare", "-n", sys.executable, "-m", "nxtrain", "launch", str(DEMO), "--nproc", "2", *overrides)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == BackendError.exit_code, done.stderr
    assert done.stderr.startswith("error: the processes of this machine cannot reach each other at 127.0.0.1: ")
    assert "Network is unreachable" in done.stderr
    assert "ip link set lo up" in done.stderr
    assert len(done.stderr.splitlines()) == 1
