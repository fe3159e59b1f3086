"""Checks before the first step: the folder, and the clock against the times in the folder."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from nxtrain.errors import BackendError, InputError
from nxtrain.train.supervision import preflight
from nxtrain.train.supervision.preflight import check_folder
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
