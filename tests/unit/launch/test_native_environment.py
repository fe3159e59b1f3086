"""Environment of a run by TorchNeuron: values, probed names, refusals, and the cores of each rank."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import torchneuron, torchneuron_names
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.common.errors import ConfigError
from nxtrain.config import cache_dir
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig
from nxtrain.launch import neuron
from nxtrain.launch.environment import Environment
from nxtrain.launch.native_variables import Reads, native_environment, rank_variables
from tests.support import TINY
from tests.unit.launch.conftest import Program

TRN2 = INSTANCES["trn2.48xlarge"]
PROBED = {
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "/locks",
    "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "7200",
    "TORCH_NEURONX_HLO_CACHE_DIR": "cache/hlo",
    "NKI_COMPILE_CACHE_URL": "cache/nki",
    "TORCH_NEURONX_ENABLE_HOST_CC": "1",
    "NEURON_RT_ENABLE_HOST_CC": "1",
    "TORCH_NEURONX_ENABLE_ASYNC_NRT": "1",
}
CERTAIN = {
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    "NEURON_RT_EXEC_TIMEOUT": "7200",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "cache/neff",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
    "MALLOC_ARENA_MAX": "64",
    "OMP_NUM_THREADS": "3",
    "NEURON_LOGICAL_NC_CONFIG": "2",
    "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
}


def run(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"run": {"seed": 7}, "compile": {"cache_dir": "cache"}, **sections})


def environment(reads: Reads = lambda name: True, **sections: dict[str, object]) -> Environment:
    return native_environment(run(**sections), TRN2, SdkVersion(2, 33), PurePath("/locks"), reads)


def values(result: Environment, **shell: str) -> dict[str, str]:
    return {variable.name: variable.value for variable in result.with_shell_values(shell)}


def test_every_variable_has_its_value_and_reason_and_nothing_is_of_xla() -> None:
    result = environment(cluster={"nodes": 2}, model={"preset": "llama2-7b"})
    network = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    assert values(result) == {**CERTAIN, **PROBED, **network}
    assert all(variable.reason for variable in result.variables)
    assert all(variable.source or variable.name == "OMP_NUM_THREADS" for variable in result.variables)


@pytest.mark.parametrize("name", [*PROBED])
def test_a_name_is_set_only_where_the_packages_read_it(name: str) -> None:
    result = environment(lambda asked: asked == name)
    assert values(result) == {**CERTAIN, name: PROBED[name]}
    others = {other for other in PROBED if other != name and not ("HOST_CC" in other and "HOST_CC" in name)}
    assert {other for note in result.notes for other in PROBED if other in note.split()} == others


def test_elsewhere_the_documented_name_is_shown_with_the_condition() -> None:
    result = environment(lambda name: None)
    assert values(result) == {
        name: value for name, value in {**CERTAIN, **PROBED}.items() if name != "NEURON_RT_ENABLE_HOST_CC"
    }
    shown = {variable.name: variable.reason for variable in result.variables}
    assert shown["TORCH_NEURONX_HLO_CACHE_DIR"].endswith("if torch-neuronx on the instance reads it")
    assert result.notes == ()


def test_names_are_found_as_whole_words_in_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchneuron_names.reads("NKI_URL") is None  # TorchNeuron is not installed here
    library, script, empty = tmp_path / "lib.so.1", tmp_path / "a.py", tmp_path / "b.py"
    library.write_bytes(b"\x00\x01XNEFF_DIR\x00NEFF_DIR_2\x00NKI_URL\x00")
    script.write_text("os.environ['HOST_CC']", encoding="utf-8")
    empty.touch()
    monkeypatch.setattr(torchneuron_names, "detect", lambda: "2.11")
    monkeypatch.setattr(torchneuron_names, "_files", lambda: (empty, script, library))
    names = ("NKI_URL", "HOST_CC", "NEFF_DIR", "NEFF_DIR_2")
    assert [torchneuron_names.reads(name) for name in names] == [True, True, False, True]


def test_the_optimization_level_goes_by_the_variable_of_its_own() -> None:
    assert values(environment(compile={"cache_dir": "cache", "optlevel": 2}))["NEURON_COMPILER_OPT_LEVEL"] == "-O2"
    assert "NEURON_COMPILER_OPT_LEVEL" not in values(environment())


@pytest.mark.parametrize(
    ("update", "rounding", "enabled"),
    [("bf16_stochastic", "hardware", "1"), ("bf16_stochastic", "auto", "0"), ("fp32", "hardware", "0")],
)
def test_the_hardware_rounds_only_where_it_is_asked_to(update: str, rounding: str, enabled: str) -> None:
    result = values(environment(precision={"update": update}, backend={"rounding": rounding}))
    assert result["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == enabled
    assert result.get("NEURON_RT_STOCHASTIC_ROUNDING_SEED") == ("7" if enabled == "1" else None)


@pytest.mark.parametrize(
    ("flags", "way_out"),
    [
        ("--auto-cast=none", "leave it out and choose the types in [precision]"),
        ("--auto_cast all", "leave it out and choose the types in [precision]"),
        ("--model-type transformer", "leave it out"),
        ("-O1", "leave it out and use compile.optlevel"),
        ("--optlevel=3", "leave it out and use compile.optlevel"),
        ("--lnc=2", "leave it out"),
        ("--target trn2", "leave it out: TorchNeuron compiles for the chip that it finds"),
    ],
)
def test_flags_that_would_split_the_cache_are_refused(flags: str, way_out: str) -> None:
    (problem,) = environment().conflicts({"NEURON_CC_FLAGS": flags})
    assert (problem.key, problem.hint) == ("NEURON_CC_FLAGS", way_out)
    assert "part of every key" in problem.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "0"),
        ("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache"),
        ("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "/tmp/local_cache"),
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "1200"),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1"),
    ],
)
def test_what_would_spoil_a_run_is_refused_with_the_way_out(name: str, value: str) -> None:
    (problem,) = environment().conflicts({name: value, "XLA_USE_BF16": "1", "NEURON_CC_FLAGS": "--verbose=info"})
    assert problem.key == name
    assert problem.hint.startswith("unset it")


def test_a_capture_of_the_whole_process_is_refused_beside_torchs_profiler() -> None:
    shell = {"NEURON_RT_INSPECT_ENABLE": "1"}
    (problem,) = environment(metrics={"profile_steps": [3, 4]}).conflicts(shell)
    assert (problem.key, problem.hint) == ("NEURON_RT_INSPECT_ENABLE", "unset it, or use metrics.profile_steps=[]")
    assert environment().conflicts(shell) == []
    assert not [name for name in values(environment(metrics={"profile_steps": [3, 4]})) if "INSPECT" in name]


def test_overlap_of_collectives_is_the_shells_choice() -> None:
    shell = {"TORCH_NEURONX_ENABLE_HOST_CC": "0"}
    assert environment().conflicts(shell) == []
    assert values(environment(), **shell)["TORCH_NEURONX_ENABLE_HOST_CC"] == "0"


@pytest.mark.parametrize(
    ("shell", "world", "cores"),
    [
        ({}, 4, [{}] * 4),  # TorchNeuron gives each its core
        ({}, 1, [{"NEURON_RT_NUM_CORES": "1"}]),
        ({"NEURON_RT_VISIBLE_CORES": "4-6,9"}, 4, ["4", "5", "6", "9"]),
        ({"NEURON_RT_VISIBLE_CORES": "0-63"}, 1, ["0"]),
    ],
)
def test_each_rank_sees_one_core(shell: dict[str, str], world: int, cores: list[dict[str, str] | str]) -> None:
    for rank, wanted in enumerate(cores):
        actual, problems = rank_variables(shell, rank, world)
        given = {variable.name: variable.value for variable in actual}
        shown = shell.get("NEURON_RT_VISIBLE_CORES")
        assert given == (
            wanted if isinstance(wanted, dict) else {"NEURON_RT_VISIBLE_CORES": wanted, "NXTRAIN_VISIBLE_CORES": shown}
        )
        assert not problems
        again, problems = rank_variables({**shell, **given}, rank, world)
        assert ({variable.name: variable.value for variable in again}, problems) == (given, [])


@pytest.mark.parametrize(
    ("shown", "reason"), [("0-2", "shows 3 cores, but 4 ranks"), ("a,b", "is not a list of cores")]
)
def test_cores_that_do_not_suffice_are_refused(shown: str, reason: str) -> None:
    _, (problem,) = rank_variables({"NEURON_RT_VISIBLE_CORES": shown}, 0, 4)
    assert reason in problem.reason
    assert problem.hint.endswith("unset it")
    native = ["backend.name=neuron-native", "cluster.instance=trn2.48xlarge", "parallel.tp=4"]
    wanted = neuron.needs(load(TINY, native).config, {"NEURON_RT_VISIBLE_CORES": shown}, 4)
    assert [item.key for item in wanted.problems] == ["NEURON_RT_VISIBLE_CORES"]


def test_an_unknown_instance_starts_with_what_the_runtime_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "this_machine", lambda: None)
    wanted = neuron.needs(load(TINY, ["backend.name=neuron-native"]).config, {}, 4)
    assert wanted.problems == ()
    assert wanted.about[0].startswith("an instance that nxtrain does not know")
    assert "NEURON_LOGICAL_NC_CONFIG" not in {variable.name for variable in wanted.variables}
    named = neuron.needs(load(TINY, ["backend.name=neuron-native", "cluster.instance=trn9"]).config, {}, 4)
    assert [problem.key for problem in named.problems] == ["cluster.instance"]


def test_nodes_may_share_graphs_over_a_network_while_locks_stay_local(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 server:/ rw\n", encoding="utf-8")
    monkeypatch.setattr(cache_dir, "MOUNTS", mounts)
    overrides = ["cluster.instance=trn2.48xlarge", f"compile.cache_dir={tmp_path}/graphs"]
    native = neuron.needs(load(TINY, ["backend.name=neuron-native", *overrides]).config, {}, 1)
    result = {variable.name: variable.value for variable in native.variables}
    assert native.problems == ()
    assert result["TORCH_NEURONX_NEFF_CACHE_DIR"] == f"{tmp_path}/graphs/neff"
    assert result["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"].startswith("/var/tmp/nxtrain-locks-")
    lazy = neuron.needs(load(TINY, ["backend.name=neuron", *overrides]).config, {}, 1)
    assert [problem.key for problem in lazy.problems] == ["compile.cache_dir"]


def test_a_rank_takes_its_core_as_it_starts_and_once(monkeypatch: pytest.MonkeyPatch, started: list[Program]) -> None:
    monkeypatch.setattr(torchneuron, "support", lambda: Support(True, "16 chips in this test"))
    config = load(TINY, ["backend.name=neuron-native", "cluster.instance=trn2.48xlarge"]).config
    for _ in range(2):
        environ = started[-1].environ if started else {"LOCAL_RANK": "2", "NEURON_RT_VISIBLE_CORES": "8-15"}
        neuron.reexec_with_environment(config, environ, local_world=4)
    ((_, _, environ),) = started
    assert environ["NEURON_RT_VISIBLE_CORES"] == "10"
    with pytest.raises(ConfigError, match=r"shows 2 cores, but 4 ranks"):
        neuron.reexec_with_environment(config, {"NEURON_RT_VISIBLE_CORES": "0,1"}, local_world=4)
