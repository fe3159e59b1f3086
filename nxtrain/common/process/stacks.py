"""Diagnosis and end of a hanging process: stacks of its threads, lock-free output, and a hard exit timer."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from nxtrain.common.errors import HangError

_IN_A_THREAD = 2
"""Value of SIGEV_THREAD in signal.h, equal on all Linux systems."""


class _Event(ctypes.Structure):
    """C type `struct sigevent`: the action when a timer expires."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """C type `struct itimerspec`: one expiry after seconds and nanoseconds."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class HardExitTimer:
    """Timer that ends the process unless it is set again in time; has no effect on systems without POSIX timers.

    A thread of the system's library calls `_exit`; Python and its locks are not involved.

    Source: timer_create(2) and sigevent(7) of https://man7.org/linux/man-pages.
    """

    def __init__(self, code: int) -> None:
        self._library, self._timer = _library(), ctypes.c_void_p()
        if self._library is not None:
            exit_process = ctypes.cast(self._library._exit, ctypes.c_void_p).value
            event = _Event(value=code, notify=_IN_A_THREAD, function=exit_process)
            if self._library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
                self._library = None

    @property
    def works(self) -> bool:
        """True if the system has POSIX timers."""
        return self._library is not None

    def set(self, seconds: float) -> None:
        """Set the timer to expire after some seconds, replacing any earlier setting; 0 disarms the timer."""
        if self._library is not None:
            whole, rest = divmod(seconds, 1.0)
            times = _Times(0, 0, int(whole), int(1e9 * rest))
            self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)


def _library() -> ctypes.CDLL | None:
    for name in (None, "librt.so.1"):  # where glibc had timers before 2.34
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            if library.timer_create and library.timer_settime and library._exit:
                return library
    return None


DUMP = signal.SIGUSR2
"""Signal on which a process prints the stacks of its threads."""

PRINT_S = 0.5
"""Seconds for printing the stacks before the process ends."""


def answer_requests() -> None:
    """Print the stacks of all threads at every `DUMP` signal; signals during interpreter shutdown are ignored.

    Stacks are printed even if all threads hang, since no lock is taken. For the same reason, CPython may crash while it
    walks a frame that is just being made. Of 14,000 signals to a process that ran Python code without a pause, 2
    crashed CPython 3.11.7. A rank waits or computes outside of Python most of the time.
    """
    if _has_descriptor():
        faulthandler.unregister(DUMP)
        with suppress(ValueError):  # only the main thread can
            signal.signal(DUMP, signal.SIG_IGN)
        faulthandler.register(DUMP, file=sys.__stderr__ or 2, all_threads=True)


def end_in(seconds: float) -> None:
    """Schedule the end of the process after some seconds, with its stacks and the exit code of a hang.

    No lock is taken. A new call postpones the end.
    """
    alarm = _alarm()
    alarm.set(seconds + PRINT_S)
    if _has_descriptor():
        faulthandler.dump_traceback_later(seconds, exit=not alarm.works, file=sys.__stderr__ or 2)


def dismiss() -> None:
    """Cancel the end scheduled by `end_in`; `DUMP` signals are still answered."""
    faulthandler.cancel_dump_traceback_later()
    _alarm().set(0)


def show() -> None:
    """Print the stacks of all threads to standard error."""
    if _has_descriptor():
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)


def write(path: Path) -> None:
    """Write the stacks of all threads to a file; the folder is created if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


_CLEAR_LINE = "\r\x1b[2K"
"""Control sequence that moves to the beginning of the line and clears the line (ECMA-48, EL)."""


def print_line(line: str) -> None:
    """Print a line to standard error without the lock of Python's stream, which a hanging thread may hold.

    Errors are ignored. On a terminal, the line replaces a live progress bar, which redraws itself below.
    """
    is_screen = os.isatty(2) and os.environ.get("TERM") not in {None, "dumb", "unknown"}
    with suppress(OSError):
        os.write(2, f"{_CLEAR_LINE if is_screen else ''}{line}\n".encode())


@functools.cache
def _alarm() -> HardExitTimer:
    return HardExitTimer(HangError.exit_code)


def _has_descriptor() -> bool:
    try:
        return sys.__stderr__ is not None and sys.__stderr__.fileno() >= 0
    except (OSError, ValueError):
        return False
