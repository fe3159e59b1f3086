"""Environment of a run on Neuron devices, and variables that a shell may not set.

The tables are what the pages named in `nxtrain.launch.variables` say for each instance, SDK and update rule.
"""

from __future__ import annotations

from itertools import product

import pytest

from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import RECOMMENDED, RELEASES, SdkVersion
from nxtrain.backends.xla.environment import DEAD, RefusedVariable
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.schema import RunConfig
from nxtrain.launch.environment import Environment
from nxtrain.launch.variables import neuron_environment

ALWAYS = {
    "MALLOC_ARENA_MAX": "64",
    "NEURON_COMPILE_CACHE_URL": "compile_cache",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_EXEC_TIMEOUT": "7200",
    "NXD_LOG_LEVEL": "warning",
    "PJRT_DEVICE": "NEURON",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
}
PER_INSTANCE = {
    "trn1.2xlarge": {"OMP_NUM_THREADS": "4", "NEURON_PARALLEL_COMPILE_MAX_RETRIES": "1"},
    "trn1.32xlarge": {"OMP_NUM_THREADS": "4"},
    "trn1n.32xlarge": {"OMP_NUM_THREADS": "4"},
    "trn2.3xlarge": {"OMP_NUM_THREADS": "3", "NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"},
    "trn2.48xlarge": {"OMP_NUM_THREADS": "3", "NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"},
    "trn2u.48xlarge": {"OMP_NUM_THREADS": "3", "NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"},
}
IN_FLIGHT = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3"}
PER_SDK = {(2, 27): IN_FLIGHT, (2, 28): IN_FLIGHT, (2, 29): IN_FLIGHT, (2, 30): IN_FLIGHT, (2, 31): {}}
TO_NEAREST = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}
PER_UPDATE = {
    "fp32": TO_NEAREST,
    "fp32_master": TO_NEAREST,
    "bf16_kahan": TO_NEAREST,
    "bf16_stochastic": {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "7"},
}
FLAGS = "--model-type=transformer --auto-cast=none --target={target} --retry_failed_compilation"
TARGETS = {
    "trn1.2xlarge": FLAGS.format(target="trn1"),
    "trn1.32xlarge": FLAGS.format(target="trn1"),
    "trn1n.32xlarge": FLAGS.format(target="trn1n"),
    "trn2.3xlarge": FLAGS.format(target="trn2") + " --logical-nc-config=2",
    "trn2.48xlarge": FLAGS.format(target="trn2") + " --logical-nc-config=2",
    "trn2u.48xlarge": FLAGS.format(target="trn2") + " --logical-nc-config=2",
}
NEWEST = SdkVersion(2, 31)


def run(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"run": {"seed": 7}, "compile": {"cache_dir": "compile_cache"}, **sections})


def environment(
    instance: str = "trn1.32xlarge", sdk: SdkVersion = RECOMMENDED, **sections: dict[str, object]
) -> Environment:
    return neuron_environment(run(**sections), INSTANCES[instance], sdk)


def values(result: Environment, **shell: str) -> dict[str, str]:
    return {variable.name: variable.value for variable in result.with_shell_values(shell)}


def problem(shell: dict[str, str], **sections: dict[str, object]) -> Problem:
    (result,) = neuron_environment(run(**sections), INSTANCES["trn1.32xlarge"], RECOMMENDED).conflicts(shell)
    return result


def test_the_tables_cover_every_instance_and_release() -> None:
    assert PER_INSTANCE.keys() == TARGETS.keys() == INSTANCES.keys()
    assert PER_SDK.keys() == RELEASES.keys()


@pytest.mark.parametrize(("instance", "sdk", "update"), [*product(PER_INSTANCE, PER_SDK, PER_UPDATE)])
def test_the_environment_is_that_of_the_tables(instance: str, sdk: tuple[int, int], update: str) -> None:
    actual = environment(instance, SdkVersion(*sdk), precision={"update": update})
    tables = (ALWAYS, PER_INSTANCE[instance], PER_SDK[sdk], PER_UPDATE[update])
    expected = {name: value for table in tables for name, value in table.items()}
    assert values(actual) == {**expected, "NEURON_CC_FLAGS": TARGETS[instance]}


def test_several_nodes_talk_over_efa() -> None:
    alone, together = values(environment()), values(environment(cluster={"nodes": 16}))
    assert together == {**alone, "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}


def test_configuration_keys_reach_the_variables_that_they_decide() -> None:
    result = values(environment(recovery={"hang_timeout_s": 99.2}, compile={"cache_dir": "/local/cache"}))
    assert result["NEURON_RT_EXEC_TIMEOUT"] == "397"
    assert result["NEURON_COMPILE_CACHE_URL"] == "/local/cache"


def test_the_runtime_profiles_only_if_steps_are_profiled_and_into_the_run_folder() -> None:
    profiled = {"run": {"dir": "/fsx/run"}, "metrics": {"profile_steps": [3, 4], "profile_ranks": [0, 9]}}
    result = neuron_environment(RunConfig.model_validate(profiled), INSTANCES["trn1.32xlarge"], RECOMMENDED)
    plain = neuron_environment(
        RunConfig.model_validate({"run": {"dir": "/fsx/run"}}), INSTANCES["trn1.32xlarge"], NEWEST
    )
    inspect = {name: value for name, value in values(result).items() if "INSPECT" in name}
    assert inspect == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_OUTPUT_DIR": "/fsx/run/logs/profiles/neuron",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "0",
    }
    assert not [name for name in values(plain) if "INSPECT" in name]
    shown = {variable.name: variable for variable in result.variables}
    assert "other ranks than metrics.profile_ranks 0, 9" in shown["NEURON_RT_INSPECT_ENABLE"].reason
    assert {shown[name].source for name in inspect} == {"tools/neuron-explorer/environment-variables.rst"}
    (elsewhere,) = result.conflicts({"NEURON_RT_INSPECT_OUTPUT_DIR": "/tmp", "NEURON_RT_INSPECT_DEVICE_PROFILE": "1"})
    assert (elsewhere.key, elsewhere.hint) == ("NEURON_RT_INSPECT_OUTPUT_DIR", "unset it and use run.dir")
    assert values(result, NEURON_RT_INSPECT_DEVICE_PROFILE="1")["NEURON_RT_INSPECT_DEVICE_PROFILE"] == "1"


@pytest.mark.parametrize(("preset", "has"), [("llama2-7b", True), ("llama3-8b", False), ("", False)])
def test_the_distribution_strategy_is_for_llama_2_alone(preset: str, has: bool) -> None:
    flags = values(environment(model={"preset": preset}))["NEURON_CC_FLAGS"]
    assert ("--distribution-strategy=llm-training" in flags) is has


def test_the_distribution_strategy_never_stands_beside_the_flash_kernel() -> None:
    def conflicts(flash: bool, **shell: str) -> list[tuple[str, str]]:
        config = run(model={"preset": "llama2-7b"})
        result = neuron_environment(config, INSTANCES["trn1.32xlarge"], RECOMMENDED, flash=flash)
        assert any(flag.name == "--distribution-strategy" for flag in result.compiler_flags) is not flash
        return [(problem.key, problem.hint) for problem in result.conflicts(shell)]

    strategy, downcast = {"NEURON_CC_FLAGS": "--distribution-strategy llm-training"}, {"XLA_DOWNCAST_BF16": "0"}
    assert conflicts(False, **strategy, **downcast) == []
    assert conflicts(True, **strategy) == [("NEURON_CC_FLAGS", "leave it out, or use backend.attention=plain")]
    assert conflicts(True, **downcast) == [("XLA_DOWNCAST_BF16", "unset it")]
    assert conflicts(True, NEURON_CC_FLAGS="-O1") == []


def test_everything_has_a_reason_and_all_but_thread_counts_a_source() -> None:
    result = environment("trn2.48xlarge", cluster={"nodes": 2}, model={"preset": "llama2-7b"})
    for variable in (*result.variables, *result.compiler_flags):
        assert variable.reason
        assert variable.source or variable.name == "OMP_NUM_THREADS"


def test_nxd_is_told_to_be_quiet_where_it_may_be_used_unless_the_shell_wants_more() -> None:
    assert values(environment(backend={"layers": "nxd"}), NXD_LOG_LEVEL="debug")["NXD_LOG_LEVEL"] == "debug"
    assert "NXD_LOG_LEVEL" not in values(environment(backend={"layers": "native"}))


@pytest.mark.parametrize("dead", DEAD, ids=lambda dead: dead.name)
def test_a_dead_variable_is_refused_with_its_replacement(dead: RefusedVariable) -> None:
    result = neuron_environment(run(), INSTANCES["trn1.32xlarge"], NEWEST)
    (refused,) = result.conflicts({dead.name: "1"})
    assert (refused.key, refused.origin, refused.hint) == (dead.name, "environment", dead.instead)
    assert refused.reason == f"1 {dead.reason}"
    assert result.conflicts({dead.name: "0"}) == []


def test_graphs_in_flight_are_those_of_the_configuration() -> None:
    name = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
    assert values(environment(backend={"in_flight": 31}))[name] == "31"
    assert name not in values(environment(sdk=NEWEST, backend={"in_flight": 31}))


def test_asynchronous_execution_is_the_shells_choice_while_it_lives() -> None:
    shell = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7"}
    assert environment(sdk=SdkVersion(2, 30)).conflicts(shell) == []
    assert values(environment(sdk=SdkVersion(2, 30)), **shell)[next(iter(shell))] == "7"
    (refused,) = environment(sdk=NEWEST).conflicts(shell)
    assert "does nothing from Neuron SDK 2.31 on" in refused.reason


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1", "precision.update=bf16_stochastic"),
        ("NEURON_RT_EXEC_TIMEOUT", "30", "recovery.hang_timeout_s"),
        ("NEURON_COMPILE_CACHE_URL", "/fsx/cache", "compile.cache_dir"),
        ("XLA_DISABLE_FUNCTIONALIZATION", "1", "unset it"),
        ("PJRT_DEVICE", "CPU", "backend.name=xla"),
    ],
)
def test_a_variable_that_the_configuration_decides_is_refused_when_it_differs(
    name: str, value: str, way_out: str
) -> None:
    refused = problem({name: value}, precision={"update": "fp32_master"})
    assert (refused.key, refused.origin) == (name, "environment")
    assert refused.reason.startswith(f"{value}, but this run needs ")
    assert way_out in refused.hint


def test_other_rounding_than_the_run_was_configured_for_is_refused_both_ways() -> None:
    assert problem({"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}, precision={"update": "bf16_stochastic"})
    assert problem({"NEURON_RT_STOCHASTIC_ROUNDING_SEED": "8"}, precision={"update": "bf16_stochastic"})
    assert environment().conflicts({"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}) == []


def test_other_logical_cores_than_the_table_has_are_refused() -> None:
    result = environment("trn2.48xlarge")
    both = {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "1"}
    assert [refused.key for refused in result.conflicts(both)] == list(both)
    (refused,) = result.conflicts({"NEURON_CC_FLAGS": "-lnc 1"})
    assert refused.reason == "-lnc 1, but this run needs --logical-nc-config=2"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--auto-cast=all", "--auto-cast=all, but this run needs --auto-cast=none"),
        ("-O1 --auto-cast matmult", "--auto-cast matmult, but this run needs --auto-cast=none"),
        ("--model_type=generic", "--model_type=generic, but this run needs --model-type=transformer"),
        ("--target trn2", "--target trn2, but this run needs --target=trn1"),
        ("--cache_dir=/fsx", "--cache_dir=/fsx would win over compile.cache_dir=compile_cache"),
    ],
)
def test_a_compiler_flag_that_contradicts_ours_is_refused(flags: str, reason: str) -> None:
    refused = problem({"NEURON_CC_FLAGS": flags})
    assert (refused.key, refused.reason) == ("NEURON_CC_FLAGS", reason)
    assert refused.hint


def test_compiler_flags_of_the_shell_follow_ours_once() -> None:
    shell = "-O 1 --auto-cast none --dump='/a b' --cache_dir=compile_cache --retry_failed_compilation"
    result = environment()
    assert result.conflicts({"NEURON_CC_FLAGS": shell}) == []
    merged = values(result, NEURON_CC_FLAGS=shell)["NEURON_CC_FLAGS"]
    assert merged == f"{TARGETS['trn1.32xlarge']} -O 1 '--dump=/a b' --cache_dir=compile_cache"
    assert values(result, NEURON_CC_FLAGS=merged)["NEURON_CC_FLAGS"] == merged


def test_flags_that_no_shell_can_split_are_an_error_and_no_traceback() -> None:
    with pytest.raises(ConfigError, match=r"NEURON_CC_FLAGS .environment.: .*No closing quotation"):
        environment().conflicts({"NEURON_CC_FLAGS": "--dump='/a"})


def test_everything_that_a_shell_has_wrong_is_listed_together() -> None:
    shell = {"XLA_USE_BF16": "1", "NEURON_RT_EXEC_TIMEOUT": "5", "NEURON_CC_FLAGS": "--auto-cast=all -lnc=2"}
    keys = [refused.key for refused in environment().conflicts(shell)]
    assert keys == ["XLA_USE_BF16", "NEURON_RT_EXEC_TIMEOUT", "NEURON_CC_FLAGS"]
