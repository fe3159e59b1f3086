"""The last means of a process that hangs: the stacks of its threads, lines that no lock holds up, and a sure end."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from nxtrain.errors import HangError
from nxtrain.process.exit_timer import Alarm

DUMP = getattr(signal, "SIGUSR2", None)
"""Asks a process for the stacks of its threads."""

PRINT_S = 0.5
"""For the stacks, before the end."""


def answer_requests() -> None:
    """Print the stacks whenever `DUMP` comes, as long as the process lives; what comes at its very end is ignored."""
    if DUMP is not None and _has_descriptor():
        faulthandler.unregister(DUMP)
        with suppress(ValueError):  # only a main thread can
            signal.signal(DUMP, signal.SIG_IGN)
        faulthandler.register(DUMP, file=sys.__stderr__ or 2, all_threads=True)


def end_in(seconds: float) -> None:
    """Print the stacks and end the process as one that hangs then, if this is not called again: without any lock."""
    alarm = _alarm()
    alarm.set(seconds + PRINT_S)
    if _has_descriptor():
        faulthandler.dump_traceback_later(seconds, exit=not alarm.works, file=sys.__stderr__ or 2)


def dismiss() -> None:
    """End nothing; requests are answered as long as the process lives."""
    faulthandler.cancel_dump_traceback_later()
    _alarm().set(0)


def show() -> None:
    """Print the stacks."""
    if _has_descriptor():
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)


def write(path: Path) -> None:
    """Write the stacks to a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def say(line: str) -> None:
    """Print without the lock of Python's stream, which another thread may hold for ever; a screen may be gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


@functools.cache
def _alarm() -> Alarm:
    return Alarm(HangError.exit_code)


def _has_descriptor() -> bool:
    try:
        return sys.__stderr__ is not None and sys.__stderr__.fileno() >= 0
    except (OSError, ValueError):
        return False
