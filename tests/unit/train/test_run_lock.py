"""A folder belongs to one run at a time, by a lock of the system that ends with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from nxtrain.common.errors import BackendError, RestartError
from nxtrain.common.run_folder import LOCK_FILE
from nxtrain.train.supervision import run_lock
from nxtrain.train.supervision.run_lock import only_run


def test_the_second_is_refused_with_the_holder_and_the_third_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "ENDING_S", 0.3)
    said = list[str]()
    with only_run(tmp_path / "run", said.append):
        with pytest.raises(BackendError) as refused, only_run(tmp_path / "run", said.append):
            pass
        assert f"in use by process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
        assert f"delete {tmp_path / 'run' / LOCK_FILE}" in str(refused.value)
        assert len(said) == 1
        with only_run(tmp_path / "other", said.append):
            pass
    with only_run(tmp_path / "run", said.append):
        assert len(said) == 1


def test_a_folder_that_is_deleted_or_moved_is_locked_again_or_left_to_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with only_run(folder, lambda line: None) as lock:
        shutil.rmtree(folder)
        lock.enter(1, "log")
        assert not folder.exists(), "a folder that is not there belongs to no other run"
        folder.mkdir()
        lock.enter(1, "checkpoint")
        with pytest.raises(BlockingIOError), (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.rename(tmp_path / "moved")
        with only_run(folder, lambda line: None):
            lock.enter(2, "training")
            with pytest.raises(BackendError, match=rf"was deleted or moved .* process {os.getpid()} on .* uses a new"):
                lock.enter(2, "log")


def test_a_lock_that_cannot_be_looked_at_is_kept(tmp_path: Path) -> None:
    with only_run(tmp_path, lambda line: None) as lock:
        with mock.patch.object(os, "stat", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
            lock.enter(1, "log")
        with pytest.raises(BlockingIOError), (tmp_path / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_that_ends_is_waited_for(tmp_path: Path) -> None:
    held = threading.Event()

    def hold() -> None:
        with only_run(tmp_path, lambda line: None):
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    with only_run(tmp_path, lambda line: None):
        pass
    thread.join()


def test_one_on_another_machine_gets_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "AWAY_S", 0.5)
    with only_run(tmp_path, lambda line: None):
        (tmp_path / LOCK_FILE).write_text('{"host": "node-7", "pid": 12}')
        began = time.monotonic()
        with pytest.raises(BackendError, match="process 12 on node-7"), only_run(tmp_path, lambda line: None):
            pass
        assert 0.5 < time.monotonic() - began < 4.0


def test_a_start_again_waits_for_what_is_left_of_the_one_before_and_may_be_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "ENDING_S", 0.0)
    monkeypatch.setattr(run_lock, "DYING_S", 0.5)
    with only_run(tmp_path, lambda line: None):
        began = time.monotonic()
        with pytest.raises(RestartError), only_run(tmp_path, lambda line: None, restarted=True):
            pass
        assert time.monotonic() - began > 0.5
    monkeypatch.setattr(run_lock, "DYING_S", 50.0)
    with only_run(tmp_path, lambda line: None):
        began = time.monotonic()
        with pytest.raises(RestartError), only_run(tmp_path, lambda line: None, restarted=True, most_s=0.2):
            pass
        assert time.monotonic() - began < 10.0, "other ranks wait for this one"


def test_where_there_are_no_locks_it_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = list[str]()
    with only_run(tmp_path, said.append):
        assert len(said) == 1
        assert "cannot be locked: No locks available" in said[0]
