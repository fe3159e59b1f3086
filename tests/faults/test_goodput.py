"""Goodput that a killed run reports, against a clock outside the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxtrain.metrics.goodput import account
from nxtrain.metrics.start_log import read
from nxtrain.run_folder import LOGS_DIR
from tests.support.command_ranks import write_config
from tests.support.runs import records

STEPS, STEP_S = 36, 0.03


def start(folder: Path, fault: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    values = ("parallel.dp=1", *overrides)
    command = (sys.executable, "-m", "nxtrain", "train", str(folder / "config.toml"), *values)
    environ = {**os.environ, "NXTRAIN_FAULTS": f"{fault},sleep@0:1:pre_step:{STEP_S}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


@pytest.mark.alone
@pytest.mark.parametrize("log_every", [1, 240])
def test_parts_of_a_killed_run_add_up_to_what_a_clock_outside_saw(tmp_path: Path, log_every: int) -> None:
    write_config(tmp_path, steps=STEPS, every=10)
    logs = f"metrics.log_every={log_every}"
    began = time.monotonic()
    killed = start(tmp_path, "kill@0:26:pre_step", logs, "checkpoint.async=false")
    assert killed.returncode == -9, killed.stderr
    time.sleep(1.0)
    resumed = start(tmp_path, "kill@0:99:pre_step", logs, "checkpoint.async=false")
    elapsed_s = time.monotonic() - began
    assert resumed.returncode == 0, resumed.stderr

    found = account(read(tmp_path / "run" / LOGS_DIR))
    spent_s = (found.productive_s, found.start_s, found.lost_s, found.detect_s, found.restart_s)
    rest_s = (found.checkpoint_stall_s, found.eval_s, found.other_s)
    assert found.wall_s == pytest.approx(sum((*spent_s, *rest_s)), abs=1e-3)
    assert found.starts == 2
    # The clock outside also sees the interpreter leave.
    assert elapsed_s - 3.0 < found.wall_s < elapsed_s
    # All but the first step of each start stand: 2 to 20, and 22 to 36.
    assert found.productive_s > 34 * STEP_S
    if log_every == 1:
        steps_s = [line["step_time_s"] for line in records(tmp_path / "run")]
        assert found.productive_s == pytest.approx(sum(steps_s) - steps_s[0] - steps_s[20], rel=0.1)
    assert found.restart_s > 1.0
    assert found.checkpoint_stall_s > 0.0
    if log_every == 1:
        assert found.lost_steps == 5  # those after the checkpoint of step 20, of which each is told
        assert found.lost_s >= 5 * STEP_S
    else:
        assert 0 <= found.lost_steps <= 5  # what was finished when the state was last written
    assert found.detect_s < 1.5
    assert [line["goodput"] for line in records(tmp_path / "run")][-1] == pytest.approx(found.goodput, rel=0.2)
    lines = [line for line in resumed.stderr.splitlines() if line.startswith("goodput ")]
    assert lines[-1] == str(found)
    assert len(lines) == 2
