"""Signals that ask a run to stop: the first is recorded, the second ends the process at once.

Python runs a handler in the main thread, between two of its instructions. The main thread may wait for other ranks for
a long time. So the system writes each signal's number to a pipe at once, and a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals of preemption by a cluster, Slurm's warning before it, a keyboard interrupt, and a closed terminal."""

REPEAT_S = 1.0
"""Seconds after the first signal in which another counts as the same request, such as one through the agent."""


class Signals:
    """Stop requests that this process has received.

    Attributes:
        asked: Name of the first signal; empty: none.
        news: Set at the first signal; threads can wait for it.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.news = threading.Event()
        self._asked_at = 0.0

    def note(self, number: int) -> None:
        """Record a signal; the second request ends the process."""
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
        """Record the signal numbers read from a pipe, until its other end is closed."""
        numbers = os.read(pipe, 64)
        while numbers:
            for number in numbers:
                if number in STOPPING:
                    self.note(number)
            numbers = os.read(pipe, 64)


@contextmanager
def noted() -> Iterator[Signals]:
    """Record the signals that ask for a stop, within this context, instead of ending the process.

    A signal that the parent process set to be ignored, as `nohup` does, stays ignored.

    Only the main thread can install handlers; in another thread the context records nothing.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=signals.follow, args=(reader,), name="nxtrain-signals", daemon=True)
    thread.start()
    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    # The thread records each signal. Without a handler, which does nothing, the signal would end the process.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in handled}
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
