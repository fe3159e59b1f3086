"""Signals that ask a run to stop: the first one is recorded, the second one ends the process at once.

Python runs a signal handler only in the main thread, which may wait for other ranks for a long time. Instead, the
system writes each signal's number to a pipe at once, and a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that request a stop: preemption by a cluster, Slurm's warning before it, Ctrl-C, and a closed terminal."""

REPEAT_S = 1.0
"""Seconds after the first signal in which another one counts as the same request, such as one from the agent."""


class Signals:
    """Record of the stop signals that this process has received.

    Attributes:
        asked: Name of the first signal; empty if there was none.
        news: Event that is set at the first signal, so that threads can wait for a signal.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.news = threading.Event()
        self._asked_at = 0.0

    def note(self, number: int) -> None:
        """Record a signal; a second request ends the process."""
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
        """Record the signal numbers read from a pipe, until the other end of the pipe is closed."""
        numbers = os.read(pipe, 64)
        while numbers:
            for number in numbers:
                if number in STOPPING:
                    self.note(number)
            numbers = os.read(pipe, 64)


@contextmanager
def noted() -> Iterator[Signals]:
    """Context in which stop signals are recorded instead of ending the process.

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
