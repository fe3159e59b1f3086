"""When no watchdog looks after a process: while its devices are opened, and while they are closed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from nxtrain.errors import HangError
from nxtrain.process import stacks
from nxtrain.process.exit_timer import Alarm
from nxtrain.process.stacks import say

Opened = TypeVar("Opened")

LAST_S = 1.0
"""What the words take at most, which need Python's lock."""

OPENING_S, MEETINGS = 60.0, 3
"""To claim the devices, and how often ranks wait for each other meanwhile, which ends by itself and tells more."""

CLOSING_S = 60.0
"""To leave the others and to free the devices, when all is saved."""


def opening(work: Callable[[], Opened], hang_timeout_s: float) -> Opened:
    """Open devices; if that takes too long, the process ends as one that hangs.

    Args:
        work: Opens them.
        hang_timeout_s: Seconds that ranks wait for each other.
    """
    seconds = OPENING_S + MEETINGS * hang_timeout_s
    told = f"error: {_me()}: its devices were not open, and the others not met, within {seconds:g} seconds"
    with bounded(seconds, told, HangError.exit_code):
        return work()


def closing(work: Callable[[], None], seconds: float, ended: BaseException | None) -> None:
    """Close devices; if that takes too long, the process ends with the code of the run's own end.

    Args:
        work: Closes them.
        seconds: That it may take.
        ended: What ended the run; None: it has ended well.
    """
    how = "the run has ended well" if ended is None else str(ended) or type(ended).__name__
    told = f"warning: {_me()}: its devices were not closed within {seconds:g} seconds, and it ends without that; {how}"
    with bounded(seconds, told, 0 if ended is None else getattr(ended, "exit_code", 1)):
        work()


@contextmanager
def bounded(seconds: float, words: str, code: int) -> Iterator[None]:
    """End the process, with the stacks of its threads, if what is done in this context takes longer.

    Args:
        seconds: That it may take.
        words: What is told then.
        code: With which the process ends then.
    """
    done, alarm = threading.Event(), Alarm(code)

    def watch() -> None:
        if not done.wait(seconds):
            say(words)
            stacks.show()
            with suppress(OSError, ValueError):  # whoever read it may be gone
                sys.stdout.flush()
            os._exit(code)

    alarm.set(seconds + LAST_S)
    with suppress(RuntimeError):  # no thread can be started, and the alarm must do
        threading.Thread(target=watch, name="nxtrain-bounded", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        alarm.set(0)


def _me() -> str:
    return f"rank {os.environ.get('RANK', '0')}"
