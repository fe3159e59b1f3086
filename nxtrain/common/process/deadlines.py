"""Deadlines for work that may hang: opening and closing devices, slow disks and stores."""

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
"""Seconds for printing the message, which needs Python's lock, before the hard exit."""

OPENING_S, MEETINGS = 60.0, 3
"""Seconds to claim the devices, and number of waits for other ranks during the claim.

Each of these waits has its own time limit and a more precise message.
"""

COMPILE_PATIENCE = 4.0
"""Factor of a hang limit for work that may compile: a compiler for an accelerator takes minutes for a graph."""

CLOSING_S = 60.0
"""Seconds to leave the process groups and to free the devices, once all is saved."""


def first_use_limit_s(hang_timeout_s: float) -> float:
    """Seconds without progress that are not a hang while graphs compile, here or on a rank that others wait for."""
    return COMPILE_PATIENCE * hang_timeout_s


def limit_words(hang_timeout_s: float, *, first_use: bool) -> str:
    """Limit of a process group in messages, with its key; with `first_use`, graphs compile while ranks wait."""
    if not first_use:
        return f"recovery.hang_timeout_s={hang_timeout_s:g} seconds"
    seconds = f"{first_use_limit_s(hang_timeout_s):g} seconds"
    return f"{seconds}, {COMPILE_PATIENCE:g} x recovery.hang_timeout_s since graphs compile at first use"


def open_with_deadline(work: Callable[[], Opened], hang_timeout_s: float) -> Opened:
    """Open devices; if opening takes too long, the process ends with the exit code of a hang."""
    seconds = OPENING_S + MEETINGS * hang_timeout_s
    rank = Placement.read().rank
    message = f"error: rank {rank}: its devices were not open, and the others not met, within {seconds:g} seconds"
    with bounded(seconds, message, HangError.exit_code):
        return work()


def close_with_deadline(work: Callable[[], None], seconds: float, ended: BaseException | None) -> None:
    """Close devices; if closing takes too long, the process ends with the exit code of the run."""
    outcome = "the run has ended well" if ended is None else str(ended) or type(ended).__name__
    message = (
        f"warning: rank {Placement.read().rank}: its devices were not closed within {seconds:g} seconds, and it ends "
        f"without that; {outcome}"
    )
    with bounded(seconds, message, 0 if ended is None else getattr(ended, "exit_code", 1)):
        work()


@contextmanager
def bounded(seconds: float, message: str, code: int) -> Iterator[None]:
    """End the process, after printing the stacks of its threads, if the body of this context exceeds a time limit."""
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
    """Runner of one background call at a time, each in a daemon thread that is never joined."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def start(self, work: Callable[[], None]) -> None:
        """Start a call, unless the previous one still runs."""
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
