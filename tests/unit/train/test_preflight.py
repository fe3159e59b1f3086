"""Checks before the first step: the folder, and the clock against the times in the folder."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from nxtrain.common.errors import BackendError, CheckpointError, InputError
from nxtrain.train.step import TrainState
from nxtrain.train.supervision import preflight
from nxtrain.train.supervision.preflight import check_folder, check_space
from nxtrain.train.supervision.run_lock import only_run


def test_a_clock_that_is_not_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(BackendError, match="the clock of this machine says 1970-01-01"):
        check_folder(tmp_path)


@pytest.mark.parametrize("locked", [False, True])
def test_a_clock_behind_what_was_written_is_refused_though_the_start_has_written_itself(
    tmp_path: Path, locked: bool
) -> None:
    ahead = time.time() + 30 * 24 * 3600
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (ahead, ahead))
    if not locked:
        os.utime(tmp_path, (ahead, ahead))
    lock = only_run(tmp_path, lambda line: None) if locked else nullcontext()
    with lock, pytest.raises(BackendError, match="was written"):
        check_folder(tmp_path)


def test_a_clock_that_is_a_little_behind_is_none(tmp_path: Path) -> None:
    ahead = time.time() + preflight.TOLERATED_S / 2
    os.utime(tmp_path, (ahead, ahead))
    check_folder(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(InputError, match=r"run\.dir=.*cannot be written: File exists; check the path"):
        check_folder(tmp_path / "run")


@pytest.mark.parametrize(
    ("free", "needed", "shown"),
    [
        (3 << 20, 9 << 20, ("3.00 MiB", "9.00 MiB")),
        (1 << 10, 10 << 10, ("1.00 KiB", "10.00 KiB")),
        (5 * 10**8, 123 * 10**9, ("476.84 MiB", "114.55 GiB")),
    ],
)
def test_space_is_shown_with_digits_that_differ_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, needed: int, shown: tuple[str, str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda state: needed)
    with pytest.raises(CheckpointError, match=f"has {shown[0]} free, and one checkpoint takes {shown[1]}"):
        check_space(tmp_path, cast("TrainState", None))
