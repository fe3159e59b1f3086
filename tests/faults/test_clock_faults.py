"""A clock that jumps, or a machine in another time zone, changes neither a run nor how it goes on."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxtrain.checkpoint import directory
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support.commands import at_batch, trained, write_config
from tests.support.runs import course, records

HOUR_S, DAY_S = 3600.0, 86400.0
STEPS = 12


def _jump(seconds: float) -> None:
    true = time.time
    time.time = lambda: true() + seconds


def _jump_at(step: int, seconds: float) -> None:
    at_batch(step, partial(_jump, seconds))


@pytest.mark.parametrize("seconds", [-HOUR_S, DAY_S])
def test_a_jump_in_the_midst_of_a_run_is_not_seen(
    tmp_path: Path, straight: list[dict[str, Any]], seconds: float
) -> None:
    write_config(tmp_path, steps=STEPS)
    trained(tmp_path, "metrics.tensorboard=true", "recovery.hang_timeout_s=20", first=partial(_jump_at, 6, seconds))
    assert course(tmp_path / "run") == straight
    for record in records(tmp_path / "run"):
        assert 0 < record["step_time_s"] < 60
        assert 0 < record["tokens_per_s"] < math.inf


@pytest.mark.parametrize("seconds", [-HOUR_S, -DAY_S - HOUR_S, DAY_S])
def test_a_start_after_a_jump_goes_on(tmp_path: Path, straight: list[dict[str, Any]], seconds: float) -> None:
    write_config(tmp_path, steps=STEPS)
    armed = "raise@0:9:fwd"
    trained(tmp_path, armed=armed, code=1)
    trained(tmp_path, armed=armed, first=partial(_jump, seconds))
    assert course(tmp_path / "run") == straight


def test_another_time_zone_is_not_seen(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    write_config(tmp_path, steps=STEPS)
    for zone, ends_with, armed in (("Pacific/Kiritimati", 1, "raise@0:9:fwd"), ("Pacific/Pago_Pago", 0, "")):
        trained(tmp_path, armed=armed, first=partial(_move, zone), code=ends_with)
    assert course(tmp_path / "run") == straight


def _move(zone: str) -> None:
    os.environ["TZ"] = zone
    time.tzset()


def test_the_newest_checkpoint_is_that_of_the_last_step_whatever_its_time(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    write_config(tmp_path, steps=STEPS, every=3)
    trained(tmp_path, "train.steps=9", f"optim.decay_steps={STEPS}")
    checkpoints = directory.list_checkpoints(tmp_path / "run" / CHECKPOINTS_DIR)
    assert len(checkpoints) > 1
    for age, path in enumerate(checkpoints):  # the last step is the oldest
        for file in (*path.iterdir(), path):
            os.utime(file, (2e9 - age * DAY_S,) * 2)
    output = trained(tmp_path)
    assert "continues after step 9\n" in output
    assert course(tmp_path / "run") == straight
