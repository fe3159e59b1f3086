"""Job scripts under a real Slurm: what is preempted, out of time, or dead goes on by itself, bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError
from tests.support import neuron_machine, runs, slurm
from tests.support.command_ranks import until
from tests.support.recovery import Golden, History, configure, last_step, start
from tests.support.runs import course
from tests.support.slurm import WITHIN_S, Job, needs_slurm

pytestmark = needs_slurm

ONE_RANK = ("--nproc=1", "parallel.dp=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Three nodes, one of which is there for another that dies."""
    with slurm.Cluster(tmp_path_factory.mktemp("slurm"), ("n1", "n2", "n3")) as found:
        yield found


@pytest.fixture(scope="module")
def golden_of_one(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = tmp_path_factory.mktemp("golden-of-one")
    configure(folder)
    return Golden.of(History(folder, [start(started_by, folder, overrides=ONE_RANK[1:], world=1)]))


@pytest.fixture
def submit(cluster: slurm.Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Submits a run of this test, of which nothing is left on the cluster when that is over."""
    jobs: list[Job] = []

    def found(*argv: str, nodes: int = 1) -> Job:
        configure(tmp_path, patience_s=30.0)
        jobs.append(Job.submitted(cluster, tmp_path, *argv, nodes=nodes))
        return jobs[-1]

    yield found
    for job in jobs:
        job.remove()


@pytest.mark.slow
def test_two_nodes_go_on_with_a_spare_one_when_one_dies(
    submit: Callable[..., Job], cluster: slurm.Cluster, golden: Golden
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
    submit: Callable[..., Job], cluster: slurm.Cluster, golden_of_one: Golden
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
    submit: Callable[..., Job], cluster: slurm.Cluster, golden_of_one: Golden, started_by: ForkServerContext
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
    cluster: slurm.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
