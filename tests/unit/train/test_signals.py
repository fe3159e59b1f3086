"""Signals are noted though the main thread is busy, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nxtrain.common.process.signals import STOPPING, noted


@pytest.fixture
def heeded() -> Iterator[None]:
    """No signal is ignored, as those of a keyboard and a terminal are where these tests run in the background."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in STOPPING]
    with noted() as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # on its other way, from an agent
        assert signals.news.wait(5)
        assert signals.asked == number.name
    assert [signal.getsignal(one) for one in STOPPING] == before
    assert "nxtrain-signals" not in [thread.name for thread in threading.enumerate()]


BUSY = """
import ctypes
from nxtrain.common.process.signals import noted
with noted():
    print("ready", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):  # the second waits for ever, and as in a collective no instruction of Python is executed
        libc.pthread_mutex_lock(mutex)
"""


def test_the_second_ends_a_process_whose_main_thread_waits() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
    finally:
        process.kill()
        _, said = process.communicate()
    assert said.startswith(b"SIGTERM again: leaving at once")


@pytest.mark.parametrize("number", STOPPING)
def test_what_is_ignored_stays_so(number: signal.Signals) -> None:
    """As `nohup` has it for a hangup, and a shell for the interrupt of what it runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with noted() as signals:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
            assert not signals.news.wait(0.1)
    finally:
        signal.signal(number, before)


def test_other_threads_note_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with noted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
