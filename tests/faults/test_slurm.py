"""Job scripts under a real Slurm: what is preempted, out of time, or dead goes on by itself, bit for bit.

The controller and the nodes run on this machine. Every daemon is Debian's. A node is a slurmd in namespaces of its own,
which has its own name and processes, so that one SIGKILL takes all of it away. Waiting times are as short as Slurm
allows.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError
from tests.support import ROOT, neuron_machine, runs
from tests.support.command_ranks import until
from tests.support.processes import free_port
from tests.support.recovery import Golden, History, Start, assert_recovered, configure, last_step, start
from tests.support.runs import course, saved_steps

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
}
"""Required Debian packages."""

NAMESPACES = ("unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "--kill-child")

NODE_TIMEOUT_S = 5
"""After which the controller gives up a node that does not answer."""

REQUEUED_WAITS_S = 5
"""Least that Slurm lets a requeued job wait; it takes less for its default of 120."""

PATIENCE_S = 60.0

CONF = """
ClusterName=nxtrain
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={waits}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdTimeout={timeout}
MessageTimeout=3
TreeWidth=1
ReturnToService=2
"""


def missing() -> str:
    """Reason why no cluster can be started here; empty if one can."""
    packages = sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=_path()) is None})
    if packages:
        return (
            f"needs Debian's packages {' '.join(packages)}; runs where bash scripts/install_slurm.sh has installed them"
        )
    done = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"needs namespaces, runs as root of a machine: {done.stderr.strip()}" if done.returncode else ""


def _path() -> str:
    # Daemons lie where users' paths do not lead, and jobs need the command of this environment.
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])


class Cluster:
    """The daemons, as a context which leaves none behind."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        self.environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        folder = self.folder
        (folder / "state").mkdir()
        text = CONF.format(folder=folder, port=free_port(), waits=REQUEUED_WAITS_S, timeout=NODE_TIMEOUT_S)
        for node in self.nodes:
            (folder / node).mkdir()
            text += f"NodeName={node} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1\n"
        text += f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES State=UP\n"
        (folder / "conf").write_text(text, encoding="utf-8")
        (folder / "hosts").write_text(f"127.0.0.1 {' '.join(self.nodes)} localhost\n", encoding="utf-8")
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        try:
            places = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
            self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *places)
            until((folder / "munge.socket").exists, PATIENCE_S, self.said)
            self._start("slurmctld", "slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            until(
                lambda: self.ask("sinfo", "--noheader", "--format=%D %T") == f"{len(self.nodes)} idle",
                PATIENCE_S,
                self.said,
            )
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def start_node(self, node: str) -> None:
        begin = 'mount --bind "$2" /etc/hosts && hostname "$1" && exec slurmd -D -N "$1"'
        self._start(node, *NAMESPACES, "sh", "-c", begin, "sh", node, str(self.folder / "hosts"))

    def kill_node(self, node: str) -> None:
        """Take a machine away, with all that runs there."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def submit(self, *argv: object, environ: Mapping[str, str] | None = None) -> int:
        """Have sbatch queue a job; its number."""
        return int(self.ask("sbatch", "--parsable", *map(str, argv), environ=environ))

    def job(self, number: int) -> dict[str, str]:
        """State of a job from the controller."""
        words = self.ask("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ask(self, *argv: str, environ: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands; empty if it fails."""
        env = {**self.environ, **(environ or {})}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env, timeout=PATIENCE_S)
        return done.stdout.strip()

    def said(self) -> dict[str, str]:
        return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in self.folder.glob("*.log")}

    def _start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ, start_new_session=True
            )

    def _stop(self) -> None:
        for node in self.nodes:
            if node in self._daemons:
                self.kill_node(node)
        for daemon in reversed([*self._daemons.values()]):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


SCRIPT = ROOT / "scripts/train.sbatch"
PACE = "sleep@*:1:fwd:0.3"
WITHIN_S = 120.0

_MISSING = missing()
# The reason names the packages or the rights that this machine lacks, and where the tests run.
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


class Job:
    def __init__(self, cluster: Cluster, folder: Path, number: int) -> None:
        self.cluster, self.folder, self.number = cluster, folder, number

    @staticmethod
    def submitted(cluster: Cluster, folder: Path, *argv: str, nodes: int = 1) -> Job:
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
        saved = tuple(saved_steps(self.folder / "run"))
        done = Start({0: 0}, {0: self.said()}, began_after=None, reached=saved[-1], saved=saved)
        assert_recovered(History(self.folder, [done]), golden, restarts=0)


ONE_RANK = ("--nproc=1", "parallel.dp=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, one of which is there for another that dies."""
    with Cluster(tmp_path_factory.mktemp("slurm"), ("n1", "n2", "n3")) as result:
        yield result


@pytest.fixture(scope="module")
def golden_of_one(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = tmp_path_factory.mktemp("golden-of-one")
    configure(folder)
    return Golden.of(History(folder, [start(started_by, folder, overrides=ONE_RANK[1:], world=1)]))


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Submits a run of this test, of which nothing is left on the cluster when that is over."""
    jobs: list[Job] = []

    def result(*argv: str, nodes: int = 1) -> Job:
        configure(tmp_path, patience_s=30.0)
        jobs.append(Job.submitted(cluster, tmp_path, *argv, nodes=nodes))
        return jobs[-1]

    yield result
    for job in jobs:
        job.remove()


@pytest.mark.slow
def test_two_nodes_go_on_with_a_spare_one_when_one_dies(
    submit: Callable[..., Job], cluster: Cluster, golden: Golden
) -> None:
    job = submit("--nproc=1", nodes=2)
    job.await_step(5)
    assert job.state("NodeList") == "n[1-2]"
    cluster.kill_node("n2")
    job.await_restart(1)
    assert job.await_end() == "COMPLETED 0:0", job.said()
    assert job.state("NodeList") == "n[1,3]"
    assert job.state("Restarts") == "1"
    assert job.resumed[0] in {3, 6}, job.said()
    job.assert_recovered(golden)
    cluster.start_node("n2")
    until(lambda: cluster.ask("sinfo", "--noheader", "--nodes=n2", "--format=%T") == "idle", WITHIN_S, cluster.said)


def test_one_that_is_warned_or_killed_queues_itself_again(
    submit: Callable[..., Job], cluster: Cluster, golden_of_one: Golden
) -> None:
    """It goes back on purpose, to the start: what Slurm starts again goes on from what the run itself has reached."""
    job = submit(*ONE_RANK, "checkpoint.resume=never")
    job.await_step(4)
    cluster.ask("scancel", "--batch", "--signal=USR1", str(job.number))  # as --signal=B:USR1@120 does
    job.await_restart(1)
    stopped = last_step(job.folder)
    assert "SIGUSR1: the run stops" in job.said()
    assert f"stopped after step {stopped}, whose checkpoint is saved" in job.said()
    job.await_step(8)
    cluster.ask("scancel", "--signal=KILL", f"{job.number}.0")  # the step that srun began
    job.await_restart(2)
    assert job.await_end() == "COMPLETED 0:0", job.said()
    assert job.state("Restarts") == "2"
    assert job.resumed[0] == stopped
    assert job.resumed[1] in {3, 6}
    job.assert_recovered(golden_of_one)


def test_what_is_requeued_from_outside_goes_on_and_what_is_cancelled_does_not(
    submit: Callable[..., Job], cluster: Cluster, golden_of_one: Golden, started_by: ForkServerContext
) -> None:
    job = submit(*ONE_RANK)
    job.await_step(3)
    cluster.ask("scontrol", "requeue", str(job.number))
    job.await_restart(1)
    requeued = last_step(job.folder)
    assert job.said().count("SIGTERM: the run stops") == 1, job.said()
    assert f"stopped after step {requeued}, whose checkpoint is saved" in job.said()
    job.await_step(requeued + 2)
    assert job.resumed == [requeued]
    cluster.ask("scancel", str(job.number))
    until(lambda: not cluster.ask("squeue", "--noheader"), WITHIN_S, job.said)
    cancelled = last_step(job.folder)
    assert f"stopped after step {cancelled}, whose checkpoint is saved" in job.said()
    assert job.await_end().startswith("CANCELLED"), job.said()
    assert job.state("Restarts") == "1", "Slurm requeues it, and the script does not once more"
    done = start(started_by, job.folder, overrides=ONE_RANK[1:], world=1)
    assert done.began_after == cancelled
    job.assert_recovered(golden_of_one)


def test_a_mistake_is_not_repeated(submit: Callable[..., Job]) -> None:
    job = submit("parallel.tpp=2")
    assert job.await_end() == f"FAILED {ConfigError.exit_code}:0", job.said()
    assert job.state("Restarts") == "0"
    assert "parallel.tpp" in job.said()


NEURON: dict[str, dict[str, Any]] = {
    "cluster": {"instance": neuron_machine.INSTANCE},
    "checkpoint": {"every": 100},
    "model": {"preset": "tiny", "config": {"num_hidden_layers": 1}},
}


def test_one_line_compiles_runs_is_preempted_and_resumes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a stand-in; the name of the run is hostile."""
    compiled = {"cache_dir": tmp_path / "cache", "manifest": tmp_path / "manifest.json", "max_recompiles": 0}
    backend = {"name": "neuron", "layers": "native"}
    runs.write_toml(tmp_path, num_rows=18, compile=compiled, backend=backend, **NEURON)
    machine = {
        **neuron_machine.install(tmp_path),
        "NXTRAIN_FAULTS": "sleep@*:1:pre_step:0.5",
        "OMP_NUM_THREADS": "1",
    }
    path = f"{machine['PATH']}:{cluster.environ['PATH']}"
    for name, value in {**machine, "SLURM_CONF": cluster.environ["SLURM_CONF"], "PATH": path}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    line = ("launch", "config.toml", "run.name=x$(touch owned) #SBATCH --nodes=3", "compile.on_miss=stop")
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain", *line, "--target=slurm"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    number = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
    assert number, done
    job = Job(cluster, tmp_path, int(number[1]))
    (tmp_path / "job.log").symlink_to(job.state("StdOut"))
    try:
        job.await_step(4)
        assert job.state("NumNodes") == "1"
        cluster.ask("scontrol", "requeue", str(job.number))
        job.await_restart(1)
        stopped = last_step(tmp_path)
        assert job.await_end() == "COMPLETED 0:0", job.said()
    finally:
        job.remove()
    assert job.state("Restarts") == "1"
    assert job.resumed == [stopped]
    assert [int(new) for new in re.findall(r"graphs are in \S+, (\d+) of them new", job.said())][1:] == [0]
    first, again = job.said().split("graphs are in ")[1:]
    assert "Call compiler" not in first.partition(" of them new")[2] + again, "the run itself compiles nothing"
    assert [record["step"] for record in course(tmp_path / "run")] == [*range(1, 13)]
    assert not (tmp_path / "owned").exists()
