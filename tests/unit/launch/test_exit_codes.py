"""Exit codes and restarts: the launcher and every cluster file go by one table."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import NxtrainError, StoppedBySignal
from nxtrain.launch import torchrun
from nxtrain.launch.exit_codes import EXIT_CODES, FINAL
from nxtrain.launch.targets import kubernetes, slurm
from tests.support.launch_cases import CASES
from tests.unit.launch.test_targets import entry

CODES = range(256)
TABLE = {code: kind for kind in EXIT_CODES for code in kind.codes}

SRUN = """#!/bin/bash
exit $CODE
"""
SCONTROL = """#!/bin/bash
[ "$1" = requeue ] && touch requeued
echo n1
"""
DRAWN = st.one_of(st.sampled_from(sorted(TABLE)), st.sampled_from(CODES))


def is_worth_restart(code: int) -> bool:
    """Rule of docs/recovery.md."""
    return TABLE[code].helps if code in TABLE else True


def bash(script: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **environ}
    return subprocess.run(
        ["bash", "-c", script, "nxtrain"], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60
    )


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="ascii")
    (folder / name).chmod(0o755)


def all_errors(kind: type[NxtrainError]) -> set[type[NxtrainError]]:
    return {kind}.union(*(all_errors(child) for child in kind.__subclasses__()))


def test_the_table_has_each_code_once_and_every_error_is_in_it() -> None:
    counts = Counter(code for kind in EXIT_CODES for code in kind.codes)
    assert set(counts.values()) == {1}
    assert {kind.exit_code for kind in all_errors(NxtrainError)} < set(counts)
    for kind in EXIT_CODES:
        named = {int(word) for word in re.findall(r"\d+", kind.text)} - {128}
        assert named == {code for code in kind.codes if code < 128}
        assert ("128 + n" in kind.text) == (137 in kind.codes)
        assert kind.helps == kind.restart.startswith("yes")


def test_final_codes_are_those_of_mistakes() -> None:
    assert {code for code in CODES if not is_worth_restart(code)} == FINAL | {0}
    assert {1, 4, 7, 75, 134, 135, 137, 138, 139}.isdisjoint(FINAL)
    assert torchrun.LOST not in FINAL


@pytest.mark.parametrize("script", ["generic", *(name for name, case in CASES.items() if case.target == "slurm")])
def test_the_function_of_slurms_script_knows_every_code(tmp_path: Path, script: str) -> None:
    text = slurm.render_generic() if script == "generic" else CASES[script].files()["train.sbatch"]
    (function,) = re.findall(r"^is_worth_restart\(\) \{.*?^\}\n", text, flags=re.DOTALL | re.MULTILINE)
    done = bash(function + "for code in {0..255}; do is_worth_restart $code && echo $code; done", tmp_path)
    assert [int(line) for line in done.stdout.split()] == [code for code in CODES if is_worth_restart(code)]


def test_slurms_script_queues_the_job_again_after_what_a_restart_may_mend(tmp_path: Path) -> None:
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", SCONTROL)
    requeued = tmp_path / "requeued"

    @settings(max_examples=30)
    @given(DRAWN)
    def check(code: int) -> None:
        requeued.unlink(missing_ok=True)
        done = bash(slurm.render_generic(), tmp_path, CODE=str(code), SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1")
        assert done.returncode == code, done.stderr
        assert requeued.exists() == is_worth_restart(code), code

    check()


def test_pods_of_a_pytorchjob_end_with_a_code_that_the_operator_restarts(tmp_path: Path) -> None:
    """Code from 128 on; source: kubeflow/training-operator v1.9, pkg/util/train/train_util.go, IsRetryableExitCode."""
    program(tmp_path, "nxtrain", SRUN)
    program(tmp_path, "getent", "#!/bin/bash\n")
    script = entry("pytorchjob.yaml")[2]

    @settings(max_examples=30)
    @given(DRAWN)
    def check(code: int) -> None:
        done = bash(script, tmp_path, CODE=str(code))
        assert (done.returncode >= 128) == is_worth_restart(code), done.stderr
        assert done.returncode == code or (done.returncode == code + 128 and code < 128)

    check()


def test_the_failure_policy_of_a_jobset_has_the_final_codes() -> None:
    _, manifest = yaml.safe_load_all(kubernetes.render(CASES["kubernetes"].job())["jobset.yaml"])
    rules = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    by_code = [(rule["action"], rule["onExitCodes"]) for rule in rules if "onExitCodes" in rule]
    assert {rule["operator"] for _, rule in by_code} == {"In"}
    actions = {code: action for action, rule in by_code for code in rule["values"]}
    assert actions == {**dict.fromkeys(FINAL, "FailJob"), StoppedBySignal.exit_code: "Ignore"}
