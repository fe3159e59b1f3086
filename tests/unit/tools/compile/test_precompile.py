"""`nxtrain compile` before it starts anything: what it refuses, and what it would run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import sdk
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.launch.local import ranks_per_node
from nxtrain.tools.compile import precompile
from nxtrain.tools.compile.compile_key import build_of
from nxtrain.tools.compile.entries import NEFF_FOLDER
from nxtrain.tools.compile.manifest import Build, CompiledGraph, GraphManifest, write_manifest
from nxtrain.tools.compile.memory import GIB, Memory
from nxtrain.tools.compile.native_compile import short_run_overrides
from nxtrain.tools.compile.parallel_compile import Compiled
from tests.support import TINY, commands
from tests.support.caches import COMPILER, key

NEURON = ("backend.name=neuron", "cluster.instance=trn1.2xlarge", "parallel.tp=2")


@pytest.fixture(autouse=True)
def bare_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NEURON", "XLA_", "PJRT_", "FI_", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "RANK", "WORLD_SIZE")
    for name in [name for name in os.environ if name.startswith(names)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(precompile, "host_memory", lambda: Memory(496 * GIB, "this machine"))


def test_dry_run_prints_the_environment_and_the_command_of_the_run_under_the_tool() -> None:
    out = commands.output_of("compile", TINY, *NEURON, "--dry-run")
    lines = out.splitlines()
    assert "export NEURON_FUSE_SOFTMAX=1" in lines
    argv = shlex.split(lines[-1])
    assert argv[:3] == ["neuron_parallel_compile", "--num_parallel", "8"]
    assert argv[3:7] == ["--parallel_compile_workdir", "DIR/work", "env", f"--chdir={Path.cwd()}"]
    _, launched, _ = commands.in_process("launch", TINY, *NEURON, "--dry-run")
    assert argv[7:] == [*shlex.split(launched.splitlines()[-1]), "recovery.max_restarts=0"]


def test_a_script_that_shows_the_graphs_in_vain_is_not_started_again() -> None:
    out = commands.output_of("compile", TINY, *NEURON, "recovery.max_restarts=100", "--dry-run")
    assert " --max-restarts=0 " in out.splitlines()[-1]


def test_of_several_nodes_all_meet_at_one() -> None:
    cluster = ("cluster.instance=trn1.32xlarge", "cluster.nodes=2", "parallel.dp=2")
    several = (str(TINY), "backend.name=neuron", "train.micro_batch=1", *cluster)
    err = commands.errors_of("compile", *several, code=2)
    assert "nxtrain compile CONFIG --first-node NAME" in err
    out = commands.output_of("compile", *several, "--first-node", "node7", "--dry-run")
    assert " --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node7:29500 " in out


def test_machines_that_extract_graphs_do_not_join_those_of_a_run() -> None:
    """A machine that compiles again would make one world with machines that train, and all would hang."""
    cluster = ("cluster.instance=trn1.32xlarge", "cluster.nodes=2", "parallel.dp=2", "train.micro_batch=1")
    args = (str(TINY), "backend.name=neuron", *cluster, "run.name=x", "--first-node", "node7", "--dry-run")
    ids = []
    for command in ("launch", "compile"):
        _, out, _ = commands.in_process(command, *args)
        ids += [word for word in shlex.split(out.splitlines()[-1]) if word.startswith("--rdzv-id=")]
    assert ids == ["--rdzv-id=x", "--rdzv-id=x-compile"]


def test_the_others_may_meet_at_a_port_of_their_own() -> None:
    cluster = ("cluster.instance=trn1.32xlarge", "cluster.nodes=2", "parallel.dp=2", "train.micro_batch=1")
    args = (str(TINY), "backend.name=neuron", *cluster, "--first-node", "node7:4000", "--dry-run")
    out = commands.output_of("compile", *args)
    assert " --rdzv-endpoint=node7:4000 " in out


def test_a_dry_run_says_which_machines_write_which_manifest() -> None:
    out = commands.output_of("compile", TINY, *NEURON, "--dry-run")
    assert "# writes compile_cache/manifests/tiny_cpu.json\n" in out
    recipe = TINY.with_name("llama2_70b_trn1.toml")  # 256 machines of 32 ranks, in order [pp 8, dp 32, tp 32]
    out = commands.output_of("compile", str(recipe), "data.source=text", "checkpoint.async=false", "--dry-run")
    lines = [line for line in out.splitlines() if line.startswith("# machines")]
    assert lines == [
        f"# machines {32 * stage}-{32 * stage + 31}, as torchrun counts them, hold pipeline stage {stage} of 8 and "
        f"write compile_cache/manifests/llama2_70b_trn1.stages-{stage}.json"
        for stage in range(8)
    ]


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sdk, "DEVICES", tmp_path)
    monkeypatch.setattr(sdk, "installed", lambda name: None)
    err = commands.errors_of("compile", TINY, *NEURON, code=5)
    assert "graphs cannot be compiled here: no Neuron device" in err
    assert "install Neuron SDK 2.28: pip install --extra-index-url" in err


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sdk, "support", lambda: Support(True, "2 chips in this test"))
    monkeypatch.setenv("PATH", str(tmp_path))
    err = commands.errors_of("compile", TINY, *NEURON, code=5)
    assert "neuron_parallel_compile, a program of torch-neuronx, is not on PATH" in err


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_other_devices_compile_nothing_beforehand(backend: str) -> None:
    err = commands.errors_of("compile", TINY, f"backend.name={backend}", code=2)
    assert f"{backend} has no graphs that are compiled before a run" in err


@pytest.mark.parametrize("text", ["no JSON", '{"version": 0}'])
def test_an_old_manifest_that_nobody_can_read_is_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    compiled = Compiled({key(1): "step 1 #1"}, {key(1): 7.0})
    assert precompile._graphs(compiled, file) == (CompiledGraph("step 1 #1", key(1).module, 7.0),)


@pytest.mark.parametrize(("nodes", "retries"), [(1, 3), (2, 0)])
def test_on_several_nodes_nothing_is_tried_again_by_one_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, retries: int
) -> None:
    given: list[int] = []

    def compile_graphs(*args: Any) -> Compiled:
        given.append(args[-1])
        return Compiled({key(1): "step 1 #1"}, {})

    monkeypatch.setattr(precompile, "compile_graphs", compile_graphs)
    monkeypatch.setattr(precompile, "_find_tool", lambda: "tool")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = (
        "cluster.instance=trn1.32xlarge",
        f"cluster.nodes={nodes}",
        f"parallel.dp={nodes}",
        "train.micro_batch=1",
    )
    paths = (f"compile.manifest={tmp_path}/a.json", f"compile.cache_dir={tmp_path}/cache")
    args = (str(TINY), "backend.name=neuron", *cluster, *paths, "--first-node=node7", "--retries=3")
    assert commands.in_process("compile", *args)[0] == 0
    assert given == [retries]


@pytest.mark.parametrize("recipe", ["tiny_cpu", "llama2_7b_trn1", "qwen3_30b_a3b_trn2"])
def test_a_rehearsal_has_the_build_of_its_run(recipe: str) -> None:
    path = TINY.with_name(f"{recipe}.toml")
    intervals = ["train.eval_every=500", "checkpoint.every=1000", "recovery.vote_every=50", "optim.schedule=wsd"]
    data = ["data.source=text", "data.path=a.txt", "data.validation_fraction=0.05"]
    given = ["backend.name=neuron-native", "backend.layers=native", *data, *intervals]
    run = load(path, given)
    world = ranks_per_node(run.config, None) * run.config.cluster.nodes
    rehearsed = load(path, [*given, *short_run_overrides(run.config, Path("DIR"))])
    builds = [build_of(resolve_config(each, world), world, {}, NEFF_FOLDER) for each in (run, rehearsed)]
    assert builds[0] == builds[1]


def test_what_was_compiled_before_keeps_its_seconds_in_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    compiled = Compiled({key(1): "step 1 #1", key(2): "step 1 #2", key(3): "log 1 #1"}, {key(2): 7.06})
    old = GraphManifest(
        "a", Build(COMPILER, (), {}), (CompiledGraph("x", key(1).module, 812.5), CompiledGraph("y", key(2).module, 1.0))
    )
    write_manifest(old, file)
    assert precompile._graphs(compiled, file) == (
        CompiledGraph("step 1 #1", key(1).module, 812.5),
        CompiledGraph("step 1 #2", key(2).module, 7.1),
        CompiledGraph("log 1 #1", key(3).module, None),
    )
