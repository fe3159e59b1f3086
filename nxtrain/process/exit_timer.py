"""A sure end: a timer of the system that leaves the process with a code, whoever holds Python's lock."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress

_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)
_IN_A_THREAD = 2
"""SIGEV_THREAD of signal.h, the same on all of Linux."""


class _Event(ctypes.Structure):
    """`struct sigevent`: what happens when the time has come."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: once, after seconds and nanoseconds."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class Alarm:
    """Ends the process once it is not put off in time; where the system has no such timer, it does nothing.

    The system's own thread calls `_exit`, so that neither Python nor any of its locks has a part in it.

    Args:
        code: With which the process ends.

    Source: timer_create(2) and sigevent(7) of https://man7.org/linux/man-pages.
    """

    def __init__(self, code: int) -> None:
        self._library, self._timer = _library(), ctypes.c_void_p()
        if self._library is not None:
            leave = ctypes.cast(self._library._exit, ctypes.c_void_p).value
            event = _Event(value=code, notify=_IN_A_THREAD, function=leave)
            if self._library.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
                self._library = None

    @property
    def works(self) -> bool:
        """Whether the system has such a timer."""
        return self._library is not None

    def set(self, seconds: float) -> None:
        """Let it come so many seconds from now, and not before; 0: not at all."""
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
