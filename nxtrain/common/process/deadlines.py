"""Time limits for calls that may hang: opening and closing devices, slow disks and stores."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from nxtrain.common.errors import HangError
from nxtrain.common.process import stacks
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.stacks import HardExitTimer, print_line

Opened = TypeVar("Opened")

LAST_S = 1.0
"""Seconds for printing a message, which needs Python's lock, before the hard exit of the process."""

OPENING_S, MEETINGS = 60.0, 3
"""Seconds to open the devices, and number of waits for other ranks while they are opened.

Each of these waits has its own time limit and a more precise message.
"""

COMPILE_PATIENCE = 4.0
"""Factor of the hang timeout for work that may compile: a compiler for accelerators takes minutes for a graph."""

CLOSING_S = 60.0
"""Seconds to destroy the process groups and to free the devices, once all state is saved."""


def first_use_limit_s(hang_timeout_s: float) -> float:
    """Hang timeout in seconds while graphs compile, on this rank or on a rank that others wait for."""
    return COMPILE_PATIENCE * hang_timeout_s


def describe_limit(hang_timeout_s: float, *, first_use: bool) -> str:
    """Text for the timeout of a process group in messages, with its configuration key.

    Args:
        hang_timeout_s: Value of `recovery.hang_timeout_s`.
        first_use: Graphs compile while ranks wait, so the longer timeout applies.
    """
    if not first_use:
        return f"recovery.hang_timeout_s={hang_timeout_s:g} seconds"
    seconds = f"{first_use_limit_s(hang_timeout_s):g} seconds"
    return f"{seconds}, {COMPILE_PATIENCE:g} x recovery.hang_timeout_s since graphs compile at first use"


def open_with_deadline(work: Callable[[], Opened], hang_timeout_s: float) -> Opened:
    """Open devices under a time limit; if it is exceeded, the process exits with the exit code of a hang."""
    seconds = OPENING_S + MEETINGS * hang_timeout_s
    rank = Placement.read().rank
    message = f"error: rank {rank}: its devices were not open, and the others not met, within {seconds:g} seconds"
    with bounded(seconds, message, HangError.exit_code):
        return work()


def close_with_deadline(work: Callable[[], None], seconds: float, ended: BaseException | None) -> None:
    """Close devices under a time limit; if it is exceeded, the process exits with the exit code of the run."""
    outcome = "the run has ended well" if ended is None else str(ended) or type(ended).__name__
    message = (
        f"warning: rank {Placement.read().rank}: its devices were not closed within {seconds:g} seconds, and it ends "
        f"without that; {outcome}"
    )
    with bounded(seconds, message, 0 if ended is None else getattr(ended, "exit_code", 1)):
        work()


@contextmanager
def bounded(seconds: float, message: str, code: int) -> Iterator[None]:
    """Context with a time limit: if the body takes longer, print the stacks of all threads and end the process."""
    done, alarm = threading.Event(), HardExitTimer(code)

    def watch() -> None:
        if not done.wait(seconds):
            print_line(message)
            stacks.show()
            with suppress(OSError, ValueError):  # the reader may be gone
                sys.stdout.flush()
            os._exit(code)

    alarm.set(seconds + LAST_S)
    with suppress(RuntimeError):  # no thread can be started, and the timer alone must do
        start_daemon(watch)
    try:
        yield
    finally:
        done.set()
        alarm.set(0)


def start_daemon(work: Callable[[], None]) -> None:
    """Start a daemon thread, without waiting for its first instruction.

    `Thread.start` waits, and for ever if the thread dies of a lack of memory before that instruction.

    Raises:
        RuntimeError: The system cannot start a thread.

    Source: https://github.com/python/cpython/issues/140746.
    """
    _thread.start_new_thread(work, ())


class SingleTask:
    """Runner of one background call at a time, in a daemon thread that is never joined."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def start(self, work: Callable[[], None]) -> None:
        """Start a call in the background, unless the previous call still runs."""
        if not self._busy.acquire(blocking=False):
            return

        def run() -> None:
            try:
                work()
            finally:
                self._busy.release()

        try:
            start_daemon(run)
        except RuntimeError:
            self._busy.release()
            raise
