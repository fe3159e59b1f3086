"""Devices that do not open or close, while no watchdog looks: the process ends with the code it would have had."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint import directory
from nxtrain.common.errors import HangError
from nxtrain.common.process import deadlines
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.train import command
from tests.support.commands import ended, start_rank, trained, write_config
from tests.support.processes import free_port

LIMIT_S = 1.0


def _sleep() -> None:
    time.sleep(1000)


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)


def never_open() -> None:
    """Let this process wait for its device for ever."""
    deadlines.OPENING_S, deadlines.MEETINGS = LIMIT_S, 0
    CpuBackend._read_placement = lambda self: _sleep()  # type: ignore[method-assign]


def never_open_with_the_lock() -> None:
    """The same, while no other thread of it can run."""
    deadlines.OPENING_S, deadlines.MEETINGS = LIMIT_S, 0
    CpuBackend._read_placement = lambda self: _hold_the_lock()  # type: ignore[method-assign]


def never_close() -> None:
    """Let this process never get rid of its device."""
    bounded_close(_sleep)


def never_close_with_the_lock() -> None:
    """The same, while no other thread of it can run."""
    bounded_close(_hold_the_lock)


def second_never_closes() -> None:
    """The same for the second of some ranks, whose others leave as ever."""
    if os.environ["RANK"] == "1":
        never_close()


def bounded_close(wait: Callable[[], None]) -> None:
    command.CLOSING_S = LIMIT_S  # type: ignore[attr-defined]
    CpuBackend.close = lambda self: wait()  # type: ignore[method-assign]


@pytest.mark.parametrize("first", [never_open, never_open_with_the_lock])
def test_a_device_that_does_not_open_is_a_hang(tmp_path: Path, first: Callable[[], None]) -> None:
    write_config(tmp_path, steps=4)
    output = trained(tmp_path, first=first, code=HangError.exit_code)
    if first is never_open:
        assert "error: rank 0: its devices were not open, and the others not met, within 1 seconds" in output
        assert "in _sleep" in output


@pytest.mark.parametrize("first", [never_close, never_close_with_the_lock])
def test_a_device_that_does_not_close_changes_nothing(tmp_path: Path, first: Callable[[], None]) -> None:
    write_config(tmp_path, steps=4)
    output = trained(tmp_path, first=first)
    assert directory.newest(tmp_path / "run" / CHECKPOINTS_DIR) is not None
    if first is never_close:
        assert "warning: rank 0: its devices were not closed within 1 seconds" in output
        assert "the run has ended well" in output


def test_a_run_that_fails_and_does_not_close_tells_why(tmp_path: Path) -> None:
    write_config(tmp_path, steps=4)
    output = trained(tmp_path, armed="raise@0:2:fwd", first=never_close, code=1)
    assert "and it ends without that; injected failure" in output


def test_no_rank_is_waited_for_that_does_not_close(tmp_path: Path) -> None:
    write_config(tmp_path, steps=4)
    port = free_port()
    processes = {rank: start_rank(tmp_path, rank, port, first=second_never_closes) for rank in range(2)}
    output = ended(tmp_path, processes, 30.0)
    assert [process.exitcode for process in processes.values()] == [0, 0], output
    assert "its devices were not closed" in output[1]
    assert "its devices were not closed" not in output[0]
