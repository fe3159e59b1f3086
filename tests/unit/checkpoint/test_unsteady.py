"""Reads of storage that fails for a while are tried again for a bounded time, and damage in rows is the storage."""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Callable

import pytest

from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.read_retry import MOST_S, PAUSES_S, RetryBudget


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    results = list[float]()
    monkeypatch.setattr(time, "sleep", results.append)
    return results


def failing(times: int, number: int = errno.EIO) -> Callable[[], int]:
    left = times

    def read() -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(number, os.strerror(number))
        return 7

    return read


def test_what_fails_for_a_while_is_read(slept: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    result = RetryBudget()
    assert result.read(failing(len(PAUSES_S)), "file") == 7
    assert slept == [*PAUSES_S]
    assert result.read(failing(1), "file") == 7
    assert capfd.readouterr().err == "WARNING: file: Input/output error; it is read again\n"


def test_what_fails_for_good_or_otherwise_is_told(slept: list[float]) -> None:
    with pytest.raises(OSError, match="Input/output"):
        RetryBudget().read(failing(99), "file")
    assert len(slept) == len(PAUSES_S)
    with pytest.raises(FileNotFoundError):
        RetryBudget().read(failing(1, errno.ENOENT), "file")
    assert len(slept) == len(PAUSES_S)


def test_all_pauses_of_a_start_are_bounded(slept: list[float]) -> None:
    result = RetryBudget()
    for number in range(40):
        with pytest.raises(OSError, match="Input/output"):
            result.read(failing(99), f"file {number}")
    assert 0.8 * MOST_S < sum(slept) <= MOST_S
    result.begin()
    assert result.read(failing(1), "file") == 7


def test_the_second_that_cannot_be_read_is_the_storage() -> None:
    result = RetryBudget()
    unread, wrong = DamagedError("a", "gone", unread=True), DamagedError("b", "wrong")
    result.hold(pickle.loads(pickle.dumps(unread)))
    result.hold(wrong)
    result.hold(wrong)
    with pytest.raises(CheckpointError, match="so the storage itself fails"):
        result.hold(unread)
