"""Goodput that a killed run reports, against a clock outside the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.metrics.goodput import account
from nxtrain.metrics.start_log import read
from tests.support.command_ranks import write_config
from tests.support.commands import command, train
from tests.support.runs import records

STEPS, STEP_S = 36, 0.03


@pytest.mark.alone
@pytest.mark.parametrize("log_every", [1, 240])
def test_parts_of_a_killed_run_add_up_to_what_a_clock_outside_saw(tmp_path: Path, log_every: int) -> None:
    write_config(tmp_path, steps=STEPS, every=10)
    overrides = ("parallel.dp=1", f"metrics.log_every={log_every}", "checkpoint.async=false")
    pace = f"sleep@0:1:pre_step:{STEP_S}"
    assert command(tmp_path, "--version")[0] == 0  # the first command waits for the imports that all forks share
    began = time.monotonic()
    code, output = train(tmp_path, *overrides, armed=f"kill@0:26:pre_step,{pace}")
    assert code == -9, output
    time.sleep(1.0)
    code, output = train(tmp_path, *overrides, armed=pace)
    elapsed_s = time.monotonic() - began
    assert code == 0, output

    result = account(read(tmp_path / "run" / LOGS_DIR))
    spent_s = (result.productive_s, result.start_s, result.lost_s, result.detect_s, result.restart_s)
    rest_s = (result.checkpoint_stall_s, result.eval_s, result.other_s)
    assert result.wall_s == pytest.approx(sum((*spent_s, *rest_s)), abs=1e-3)
    assert result.starts == 2
    # The clock outside also sees the interpreter leave.
    assert elapsed_s - 3.0 < result.wall_s < elapsed_s
    # All but the first step of each start stand: 2 to 20, and 22 to 36.
    assert result.productive_s > 34 * STEP_S
    if log_every == 1:
        steps_s = [line["step_time_s"] for line in records(tmp_path / "run")]
        assert result.productive_s == pytest.approx(sum(steps_s) - steps_s[0] - steps_s[20], rel=0.1)
    assert result.restart_s > 1.0
    assert result.checkpoint_stall_s > 0.0
    if log_every == 1:
        assert result.lost_steps == 5  # those after the checkpoint of step 20, of which each is told
        assert result.lost_s >= 5 * STEP_S
    else:
        assert 0 <= result.lost_steps <= 5  # what was finished when the state was last written
    assert result.detect_s < 1.5
    assert [line["goodput"] for line in records(tmp_path / "run")][-1] == pytest.approx(result.goodput, rel=0.2)
    lines = [line for line in output.splitlines() if line.startswith("goodput ")]
    assert lines[-1] == str(result)
    assert len(lines) == 1, "a run that ends soon after its restart has one line"
