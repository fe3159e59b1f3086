"""Logs of communication: as data, in the launcher's script, and for ranks that another program starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nxtrain.config.load import load
from nxtrain.launch.debug import agent_settings, debug_variables, open_debug_folder
from nxtrain.launch.environment import QUIET_PROFILER
from nxtrain.launch.neuron import reexec_with_environment
from tests.support import TINY
from tests.support.launch_cases import local_command
from tests.unit.launch.conftest import Program
from tests.unit.launch.test_neuron import ON_TRN2

ON = "recovery.debug=dist"
PAIR = ("train.micro_batch=8", "parallel.dp=2")


def wanted(logs: Path) -> dict[str, str]:
    return {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_DISABLE_ADDR2LINE": "1",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "GLOO_LOG_LEVEL": "INFO",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(logs / "dist/nccl-%h-%p.txt"),
    }


NEURON = {"NEURON_RT_LOG_LEVEL": "INFO", "NEURON_RT_LOG_LOCATION": "console"}


def test_a_run_that_does_not_ask_for_logs_gets_none(tmp_path: Path) -> None:
    config = load(TINY, [f"run.dir={tmp_path / 'run'}"]).config
    assert debug_variables(config, {}, neuron=True) == ()
    assert agent_settings(config, {}) == ((), ())
    assert open_debug_folder(config, is_alone=False) == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("neuron", [False, True])
def test_every_variable_has_its_value_reason_and_source(tmp_path: Path, neuron: bool) -> None:
    config = load(TINY, [ON, f"run.dir={tmp_path}"]).config
    actual = debug_variables(config, {}, neuron=neuron)
    assert {item.name: item.value for item in actual} == wanted(tmp_path / "logs") | (NEURON if neuron else {})
    assert all(item.reason and item.source for item in actual)


def test_the_launcher_sets_them_and_its_agent_writes_a_file_of_each_rank(tmp_path: Path) -> None:
    command = local_command(TINY, [ON, f"run.dir={tmp_path}", *PAIR], None, {"OMP_NUM_THREADS": "1"})
    prefix = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "}
    assert command.env == wanted(tmp_path / "logs") | prefix
    assert {f"--log-dir={tmp_path}/logs/dist", "--tee=3"} <= {*command.argv}
    alone = local_command(TINY, [ON, f"run.dir={tmp_path}"], None, {"OMP_NUM_THREADS": "1"})
    assert alone.env == wanted(tmp_path / "logs")
    assert not any("log-dir" in word for word in alone.argv)
    silent = local_command(TINY, PAIR, None, {"OMP_NUM_THREADS": "1"})
    assert (silent.env, [word for word in silent.argv if "log-dir" in word or "tee" in word]) == ({}, [])


def test_torchs_profiler_is_quiet_where_there_is_no_gpu() -> None:
    profiled = ("metrics.profile_steps=[3,4]", *PAIR)
    shell = {"OMP_NUM_THREADS": "1"}
    assert local_command(TINY, profiled, None, shell).env == {QUIET_PROFILER.name: "6"}
    assert local_command(TINY, profiled, None, {**shell, QUIET_PROFILER.name: "0"}).env == {QUIET_PROFILER.name: "0"}
    assert QUIET_PROFILER.name not in local_command(TINY, [*profiled, "backend.name=cuda"], None, shell).env


def test_on_neuron_devices_the_runtime_writes_beside_the_rank(tmp_path: Path) -> None:
    shell = {"NEURON_RT_LOG_LEVEL": "DEBUG"}
    result = local_command(TINY, [ON, f"run.dir={tmp_path}", *ON_TRN2, "train.global_batch=1024"], 64, shell).env
    assert result.items() >= (NEURON | shell).items()


def test_a_rank_of_another_launcher_starts_anew_with_them_once_and_keeps_what_the_shell_chose(
    tmp_path: Path, started: list[Program]
) -> None:
    config = load(TINY, [ON, f"run.dir={tmp_path}"]).config
    shell = {"RANK": "1", "NCCL_DEBUG": "TRACE", "OMP_NUM_THREADS": "1"}
    reexec_with_environment(config, shell, local_world=2)
    ((program, argv, environ),) = started
    assert (program, argv) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
    assert environ == wanted(tmp_path / "logs") | shell
    reexec_with_environment(config, environ, local_world=2)
    reexec_with_environment(load(TINY, ()).config, shell, local_world=2)
    assert len(started) == 1


def test_a_rank_says_where_its_lines_are_and_what_cannot_be_set_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs/dist"
    config = load(TINY, [ON, f"run.dir={tmp_path}"]).config
    assert "a lone rank communicates with no other" in open_debug_folder(config, is_alone=True)
    shared = open_debug_folder(config, is_alone=False)
    assert folder.is_dir()  # NCCL does not make the folder of its files
    assert "share one standard error, which was open before they started" in shared
    assert shared.endswith(f"use nxtrain launch, or torchrun --log-dir={folder} --tee=3")
    own = folder / "run_x/attempt_0/1/stderr.log"
    own.parent.mkdir(parents=True)
    own.write_text("", encoding="utf-8")
    before = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: own.stat() if fd == 2 else before(fd))
    assert open_debug_folder(config, is_alone=False).endswith(f"{folder}/*/attempt_*/LOCAL_RANK/stderr.log")
