"""What the watchdog's thread outlives."""

from __future__ import annotations

import os

import pytest

from nxtrain.train.recovery import watchdog
from nxtrain.train.recovery.signals import Signals


@pytest.fixture
def dead_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)


@pytest.mark.usefixtures("dead_screen")
def test_a_screen_that_is_gone_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog._say("a line")
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = Signals()
    signals.note(15)
    signals._asked_at -= 2
    signals.note(10)
    assert ended == [128 + 10]
