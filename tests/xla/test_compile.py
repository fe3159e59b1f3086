"""`nxtrain compile` from end to end on a pretended Trainium machine, and the runs that its manifest lets pass."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.commands import clean, ls, verify
from nxtrain.tools.compile.entries import EntryState
from nxtrain.tools.compile.manifest import GraphManifest, read_manifest
from nxtrain.tools.compile.module_folders import naming
from tests.support import ROOT
from tests.support.caches import COMPILER
from tests.support.neuron_machine import PAUSE, assert_real, command, install
from tests.support.processes import Started
from tests.support.xla_processes import start

STEPS = 3


@dataclass(frozen=True)
class Machine:
    """A pretended Trainium machine, with the graphs of one configuration compiled."""

    folder: Path
    env: Mapping[str, str]
    said: str = ""

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache")

    @property
    def manifest(self) -> GraphManifest:
        return read_manifest(self.folder / "tiny_cpu.json")

    def argv(self, name: str, *overrides: str) -> list[str]:
        """Command line of nxtrain on the tiny configuration."""
        values = [
            *("backend.name=neuron", "cluster.instance=trn1.2xlarge", "parallel.tp=2", "model.config.vocab_size=300"),
            *(f"compile.cache_dir={self.folder / 'cache'}", f"compile.manifest={self.folder / '{name}.json'}"),
            *("data.source=tokens", f"data.path={self.folder / 'rows.npy'}", "data.validation_fraction=0"),
            *("train.seq_len=16", "train.global_batch=4", "train.micro_batch=1", "train.eval_every=0"),
            *(f"train.steps={STEPS}", "optim.warmup_steps=0", "checkpoint.every=0", "metrics.log_every=1"),
            *("metrics.tensorboard=false", "metrics.progress=false", f"run.dir={self.folder / 'run'}", *overrides),
        ]
        return [name, str(ROOT / "configs/tiny_cpu.toml"), *values]

    def launch(self, *overrides: str, pause_s: float = 0.0) -> Started:
        """Start a run; the agent and the ranks are forks of it."""
        env = {**self.env, PAUSE: str(pause_s)}
        argv = self.argv("launch", "compile.on_miss=stop", *overrides)
        return start(command, env, *argv, env=env, log=self.folder / f"launch-{pause_s:g}.log")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    rows = np.random.default_rng(0).integers(0, 300, (64, 17), dtype=np.uint16)
    np.save(folder / "rows.npy", rows)
    env = {**install(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    argv = [sys.executable, "-m", "nxtrain", *Machine(folder, env).argv("compile", "train.steps=7")]
    done = subprocess.run(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert_real(folder, processes=2)
    return Machine(folder, env, done.stdout)


def test_every_graph_of_the_run_is_compiled_and_named_in_the_manifest(machine: Machine) -> None:
    manifest = machine.manifest
    names = [graph.name for graph in manifest.graphs]  # a micro-batch, the update, what is logged beside
    assert names == ["step 1 (training) #1", "step 1 (training) #2", "step 1 (log) #1"]
    assert {(of.compiler, of.module) for of in machine.cache.done()} == {(COMPILER, g.module) for g in manifest.graphs}
    assert all(graph.seconds is not None for graph in manifest.graphs)
    assert manifest.build.flags == ("--model-type=transformer", "--auto-cast=none", "--target=trn1")
    assert manifest.build.settings["train.micro_batch"] == 1
    assert f"nxtrain compile: all 3 graphs are in {machine.cache}, 3 of them new, " in machine.said
    assert "extracting: step 1 (training)" in machine.said
    assert not list(machine.folder.glob("nxtrain-compile-*"))


def test_the_commands_for_caches_find_it_whole(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    total = len(machine.manifest.graphs)
    ls(str(machine.cache.root), as_json=True)
    assert json.loads(capsys.readouterr().out)["counts"]["done"] == total
    verify(str(machine.cache.root))
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"{total} as they were sealed, 0 hashed for the first time, 0 damaged"
    )


def test_the_run_compiles_nothing_while_one_with_another_setting_ends_at_its_first_graph(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [machine.launch(), machine.launch("train.micro_batch=2", f"run.dir={machine.folder / 'other'}", pause_s=20)]
    same, other = (run.ended(200) for run in runs)
    said, others = same.printed, other.printed
    assert same.code == 0, said[-6000:]
    lines = (machine.folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "Call compiler" not in said
    assert "\nwarning: " not in said

    assert other.code == 5, others[-6000:]
    assert "warning: this run is not what was compiled, and may need other graphs:\n    train.micro_batch: " in others
    (missed,) = {entry.key for entry in machine.cache.entries()} - machine.cache.done()
    assert (
        f"error: the graph {missed.module} was not compiled beforehand\n"
        "    train.micro_batch: compiled 1, needed 2\n"
        "    precompile again with the configuration of this run: nxtrain compile CONFIG\n"
    ) in others
    assert "Traceback" not in others
    assert (machine.folder / "other/metrics.jsonl").read_text(encoding="utf-8") == ""  # not one step
    # With those that compiled; the first miss may end the other rank of its run before that rank has a graph.
    assert_real(machine.folder, processes=6, may_lack=1)

    # Nobody waits for the lock that is left, and nobody works for it.
    entry = machine.cache.entry(missed)
    assert entry is not None
    assert entry.state is EntryState.STALE
    clean(str(machine.cache.root), None, failed=False, stale=True)
    assert f"{missed}  lock broken" in capsys.readouterr().out
    end = time.monotonic() + 120
    while pids := list(naming(missed.module)):
        assert time.monotonic() < end, pids
        time.sleep(0.2)
