"""Signals that ask a run to stop: the first is noted, the second ends the process at once.

Python runs a handler in the main thread, between two of its instructions, and the main thread may wait for other ranks
for a long time. So the system writes each signal to a pipe at once, and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""The last breath of a cluster, Slurm's warning before it, a keyboard, and a terminal that is closed."""

REPEAT_S = 1.0
"""What comes so soon after the first is the same request on another way, as from a cluster and from the agent."""


class Signals:
    """What this process was asked for.

    Attributes:
        asked: Name of the first signal; empty: none came.
        news: Set as soon as one came, for a thread to wait for.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.news = threading.Event()
        self._asked_at = 0.0

    def note(self, number: int) -> None:
        """Take a signal; the second one does not return."""
        now = time.monotonic()
        if not self.asked:
            self._asked_at = now
            self.asked = signal.Signals(number).name
            self.news.set()
        elif now - self._asked_at > REPEAT_S:
            with suppress(OSError):  # the screen may be gone
                name = signal.Signals(number).name
                os.write(2, f"{name} again: leaving at once, without another checkpoint\n".encode())
            os._exit(128 + number)

    def follow(self, pipe: int) -> None:
        """Take what the system writes to a pipe, until its other end is closed."""
        while numbers := os.read(pipe, 64):
            for number in numbers:
                if number in STOPPING:
                    self.note(number)


@contextmanager
def noted() -> Iterator[Signals]:
    """Note the signals that ask for a stop, within this context, instead of dying of them.

    One that whoever started the process had it ignore, as `nohup` does, stays ignored.

    Only a main thread can; in another the context notes nothing.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=signals.follow, args=(reader,), name="nxtrain-signals", daemon=True)
    thread.start()
    heeded = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _noted) for number in heeded}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def _noted(number: int, frame: FrameType | None) -> None:
    """Leave it to the thread: a signal without a handler would end the process."""
