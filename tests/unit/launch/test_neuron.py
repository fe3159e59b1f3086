"""Environment of a run on Neuron devices: printed, passed to ranks, or set by a rank itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import Package
from nxtrain.common.errors import ConfigError
from nxtrain.config.cache_dir import host_name
from nxtrain.config.load import load
from nxtrain.launch import neuron
from nxtrain.launch.neuron import reexec_with_environment
from tests.support import TINY
from tests.support.commands import in_process, output_of
from tests.support.launch_cases import local_command
from tests.unit.launch.conftest import Program

RECIPE = TINY.with_name("llama2_7b_trn1.toml")
ON_TRN2 = ("backend.name=neuron", "cluster.instance=trn2.48xlarge")


def test_dry_run_prints_a_script_of_environment_and_command() -> None:
    printed = output_of("launch", TINY, "--dry-run", *ON_TRN2)
    lines = printed.splitlines()
    assert lines[0].startswith("# trn2.48xlarge, Neuron SDK ")
    assert lines[-1] == shlex.join([sys.executable, "-m", "nxtrain", "train", str(TINY), *ON_TRN2])
    exports = [line for line in lines if line.startswith("export ")]
    assert "export NEURON_LOGICAL_NC_CONFIG=2" in exports
    for line in exports:
        assert lines[lines.index(line) - 1].startswith("# "), f"{line} has no reason"


def test_what_dry_run_prints_sets_the_environment_in_a_shell() -> None:
    command = local_command(TINY, ON_TRN2, None, {})
    exports, _ = str(command).rsplit("\n", 1)
    done = subprocess.run(["bash", "-ec", f"{exports}\nenv -0"], capture_output=True, text=True, timeout=60, check=True)
    result = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    assert result.items() >= command.env.items()
    assert len(command.env) > 10


def test_of_a_run_that_cannot_start_yet_dry_run_prints_what_each_node_runs_and_then_the_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    code, printed, errors = in_process("launch", RECIPE, "data.source=text", "data.packing=best_fit", "--dry-run")
    assert code == 2
    assert "\nexport NEURON_RT_STOCHASTIC_ROUNDING_EN=1\n" in printed
    assert "\nexport FI_PROVIDER=efa\n" in printed
    assert " --nnodes=128 --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29500 " in printed
    assert " --nproc-per-node=32 " in printed
    keys = [line.split()[1] for line in errors.splitlines() if line.startswith("error: ")]
    assert {"data.packing", "XLA_USE_BF16"} <= set(keys)
    assert "    unset it and use precision.params=bf16\n" in errors


def test_several_nodes_are_no_problem_of_a_dry_run() -> None:
    argv = ("launch", TINY, "cluster.nodes=2", "parallel.dp=2", "train.micro_batch=1")
    code, printed, _ = in_process(*argv, "--dry-run")
    assert (code, " --nnodes=2 " in printed) == (0, True)
    code, printed, _ = in_process(*argv, "--dry-run", "--first-node", "node0")
    assert (code, " --rdzv-endpoint=node0:29500 " in printed) == (0, True)
    code, _, errors = in_process(*argv)
    assert (code, "start it on each node with --first-node NAME" in errors) == (2, True)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        (
            ["instance=trn2.48xlrge"],
            r"cluster\.instance \(override\): trn2.48xlrge is not a .*\n.*mean trn2\.48xlarge\?",
        ),
        (["instance=trn1.2xlarge"], r"4 ranks per machine, but trn1\.2xlarge has 2 cores\n.*cluster\.nodes=2"),
        (["instance=trn1.2xlarge", "nodes=2"], r"2 machines, but trn1\.2xlarge has no EFA device"),
        (["instance=trn1.32xlarge", "nodes=3"], r"4 ranks, .* do not divide over 3 nodes"),
    ],
)
def test_machines_that_do_not_fit_are_refused(cluster: list[str], problem: str) -> None:
    overrides = ["backend.name=neuron", "parallel.dp=4", *(f"cluster.{value}" for value in cluster)]
    with pytest.raises(ConfigError, match=problem):
        local_command(TINY, overrides, None, {})


def test_the_instance_is_that_of_this_machine_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "this_machine", lambda: INSTANCES["trn1n.32xlarge"])
    assert "--target=trn1n" in local_command(TINY, ["backend.name=neuron"], None, {}).env["NEURON_CC_FLAGS"]
    monkeypatch.setattr(neuron, "this_machine", lambda: None)
    with pytest.raises(ConfigError, match=r"cluster\.instance \(default\): not set.*\n.*trn1\.32xlarge"):
        local_command(TINY, ["backend.name=neuron"], None, {})


LLAMA2 = ("model.preset=llama2-7b", "train.seq_len=4096", "parallel.tp=8", "precision.params=bf16")
STRATEGY = "--distribution-strategy=llm-training"


@pytest.mark.parametrize(
    ("attention", "distributed", "flash"),
    [("auto", "0.17.26814", True), ("auto", "", False), ("plain", "0.17.26814", False), ("flash", "0.17.26814", True)],
)
def test_compiler_flags_follow_the_attention_that_a_rank_will_choose(
    monkeypatch: pytest.MonkeyPatch, attention: str, distributed: str, flash: bool
) -> None:
    package = Package("neuronx-distributed", distributed) if distributed else None
    monkeypatch.setattr(neuron, "installed", lambda _: package)
    overrides = [*LLAMA2, f"backend.attention={attention}", "backend.name=neuron", "cluster.instance=trn1.32xlarge"]
    config = load(TINY, [*overrides, "precision.update=fp32_master"]).config
    wanted = neuron.needs(config, {}, 8)
    assert wanted.problems == ()
    assert any(line.startswith("flash attention" if flash else "blocked attention") for line in wanted.about)
    (flags,) = (variable.value for variable in wanted.variables if variable.name == "NEURON_CC_FLAGS")
    assert (STRATEGY in flags) is not flash


def test_attention_that_cannot_be_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "installed", lambda _: None)
    with pytest.raises(ConfigError, match=r"backend\.attention \(override\): flash cannot be had: neuronx-distributed"):
        local_command(TINY, [*ON_TRN2, "backend.attention=flash"], None, {})
    with pytest.raises(
        ConfigError, match=r"flash is a kernel of backend\.name=cuda and neuron and neuron-native, not of cpu"
    ):
        local_command(TINY, ["backend.name=cpu", "backend.attention=flash"], None, {})


def test_torchneuron_is_for_the_second_generation() -> None:
    native = ["backend.name=neuron-native", "cluster.instance=trn2.48xlarge"]
    result = local_command(TINY, native, None, {}).env
    assert result["TORCH_NEURONX_NEFF_CACHE_DIR"].endswith(f"{host_name()}/neff")
    assert not any(name.startswith(("PJRT", "XLA")) for name in result)
    with pytest.raises(ConfigError, match=r"trn1\.32xlarge .*first generation.*\n.*backend\.name=neuron"):
        local_command(TINY, [native[0], "cluster.instance=trn1.32xlarge"], None, {})


@pytest.mark.parametrize("name", ["neuron-native", "auto"])
def test_a_rank_on_torchneuron_starts_anew_too(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], name: str
) -> None:
    monkeypatch.setattr(torchneuron, "support", lambda: Support(True, "16 chips in this test"))
    reexec_with_environment(load(TINY, [f"backend.name={name}", ON_TRN2[1]]).config, {}, local_world=64)
    ((_, _, environ),) = started
    assert environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
    assert "PJRT_DEVICE" not in environ


def test_only_runs_on_neuron_devices_get_their_variables() -> None:
    assert local_command(TINY, (), None, {"OMP_NUM_THREADS": "1"}).env == {}


def test_a_rank_that_lacks_variables_starts_anew_with_them_once(
    monkeypatch: pytest.MonkeyPatch, started: list[Program]
) -> None:
    monkeypatch.setattr(neuron, "support", lambda: Support(True, "2 chips in this test"))
    config = load(TINY, [*ON_TRN2, "run.seed=3"]).config
    reexec_with_environment(config, {"RANK": "5", "MALLOC_ARENA_MAX": "8"}, local_world=64)
    ((program, argv, environ),) = started
    assert (program, argv) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
    assert (environ["RANK"], environ["MALLOC_ARENA_MAX"], environ["PJRT_DEVICE"]) == ("5", "8", "NEURON")
    reexec_with_environment(config, environ, local_world=64)
    assert len(started) == 1


@pytest.mark.parametrize("given", [{}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}])
def test_deterministic_ranks_of_gpus_have_cublas_take_part(started: list[Program], given: dict[str, str]) -> None:
    """A value of the shell stays; the backend refuses those that do not serve."""
    overrides = ["backend.name=cuda", "backend.deterministic=true"]
    shell = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", **given}
    wanted = {} if given else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert wanted.items() <= {**given, **local_command(TINY, overrides, None, shell).env}.items()
    reexec_with_environment(load(TINY, overrides).config, shell, local_world=1)
    reached = {**shell, **(started[-1].environ if started else {})}
    assert reached["CUBLAS_WORKSPACE_CONFIG"] == {**wanted, **given}["CUBLAS_WORKSPACE_CONFIG"]
    assert "CUBLAS_WORKSPACE_CONFIG" not in local_command(TINY, ["backend.name=cuda"], None, shell).env


@pytest.mark.parametrize(("nodes", "started_on"), [(1, 2), (2, 1)])
def test_a_rank_gets_what_the_number_of_machines_needs_that_torchrun_joined(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], nodes: int, started_on: int
) -> None:
    monkeypatch.setattr(neuron, "support", lambda: Support(True, "2 chips in this test"))
    config = load(TINY, [*ON_TRN2, f"cluster.nodes={nodes}"]).config
    reexec_with_environment(config, {"GROUP_WORLD_SIZE": str(started_on)}, local_world=64)
    assert ("FI_PROVIDER" in started[0].environ) is (started_on > 1)


@pytest.mark.parametrize(("rank", "profiles"), [("1", "1"), ("2", "0")])
def test_ranks_that_are_not_profiled_turn_the_runtimes_profile_off_once(
    monkeypatch: pytest.MonkeyPatch, started: list[Program], rank: str, profiles: str
) -> None:
    monkeypatch.setattr(neuron, "support", lambda: Support(True, "2 chips in this test"))
    config = load(TINY, [*ON_TRN2, "metrics.profile_steps=[2, 3]", "metrics.profile_ranks=[0, 1]"]).config
    launched = {variable.name: variable.value for variable in neuron.needs(config, {}, 4).variables}
    assert launched["NEURON_RT_INSPECT_ENABLE"] == "1"
    for _ in range(2):
        environ = started[-1].environ if started else {**launched, "RANK": rank}
        reexec_with_environment(config, environ, local_world=4)
    assert [start.environ["NEURON_RT_INSPECT_ENABLE"] for start in started] == ["0"] * (profiles == "0")


def test_a_rank_whose_environment_contradicts_its_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "support", lambda: Support(True, "2 chips in this test"))
    with pytest.raises(ConfigError, match=r"NEURON_RT_EXEC_TIMEOUT .*: 5, but this run needs 7200"):
        reexec_with_environment(load(TINY, ON_TRN2).config, {"NEURON_RT_EXEC_TIMEOUT": "5"}, local_world=1)


def test_a_rank_without_neuron_devices_is_left_to_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "support", lambda: Support(False, "no chip in this test"))
    for name in ("neuron", "auto", "cpu"):
        shell = {"XLA_USE_BF16": "1", "OMP_NUM_THREADS": "1"}
        reexec_with_environment(load(TINY, [f"backend.name={name}"]).config, shell, local_world=1)


def test_the_cache_is_the_folder_of_this_machine_on_a_disk_of_its_own(tmp_path: Path) -> None:
    config = load(TINY, [*ON_TRN2, f"compile.cache_dir={tmp_path}/{{host}}"]).config
    result = {variable.name: variable.value for variable in neuron.needs(config, {}, 1).variables}
    assert result["NEURON_COMPILE_CACHE_URL"] == str(tmp_path / host_name())
    bucket = load(TINY, [*ON_TRN2, "compile.cache_dir=s3://bucket/graphs"]).config
    assert [problem.key for problem in neuron.needs(bucket, {}, 1).problems] == ["compile.cache_dir"]
