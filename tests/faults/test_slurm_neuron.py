"""One command line under a real Slurm compiles, runs, is preempted and resumes on a pretended Trainium machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import neuron_machine, runs, slurm
from tests.support.recovery import last_step
from tests.support.runs import course
from tests.support.slurm import Job, needs_slurm

pytestmark = needs_slurm


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Three nodes, of which a run that asks for one gets one."""
    with slurm.Cluster(tmp_path_factory.mktemp("slurm"), ("n1", "n2", "n3")) as found:
        yield found


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
