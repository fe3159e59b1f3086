"""Retries of reads from storage that fails temporarily, and the distinction of unreadable from damaged files."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.regular import NotRegularError

T = TypeVar("T")

TRANSIENT_ERRNOS = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""Numbers of read errors that may be temporary: for lost bytes on a disk, or a lost connection of a network file
system.
"""

PAUSES_S = (0.1, 0.4, 1.0, 2.0)
"""Seconds to wait before each retry of a read."""

MOST_S = 12.0
"""Maximum seconds of all retry pauses of one process, so that many bad sectors do not each cost a wait."""


class RetryBudget:
    """Seconds left for retry pauses of reads, and number of unreadable checkpoint files, since the process start."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.begin()

    def begin(self) -> None:
        """Reset the remaining seconds and all counts."""
        self._left_s = MOST_S
        self._warned: set[str] = set()
        self._unread = 0

    def read(self, read: Callable[[], T], name: Path | str) -> T:
        """Call a function that reads, and retry it after temporary storage errors."""
        for pause_s in PAUSES_S:
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT_ERRNOS or not self._may_wait(pause_s, name, error):
                    raise
            time.sleep(pause_s)
        return read()

    def hold(self, damaged: DamagedError) -> None:
        """Raise a CheckpointError if a second checkpoint is unreadable, since the storage itself must then have failed.

        Otherwise the caller may quarantine the checkpoint.
        """
        self._unread += damaged.unread
        if damaged.unread and self._unread > 1:
            raise CheckpointError(
                f"{damaged.file}: {damaged.reason}, and another checkpoint could not be read either, so the storage "
                "itself fails, and no checkpoint is quarantined. Start again when the storage works"
            )

    def _may_wait(self, pause_s: float, name: Path | str, error: OSError) -> bool:
        with self._lock:
            if self._left_s < pause_s:
                return False
            self._left_s -= pause_s
            if str(name) not in self._warned:
                self._warned.add(str(name))
                print(f"WARNING: {name}: {error.strerror}; it is read again", file=sys.stderr)
            return True


retry_budget = RetryBudget()
"""Retry budget of this process."""


def damage(path: Path | str, error: OSError) -> OSError | DamagedError:
    """Translate a read error into a DamagedError if the file is absent, irregular or unreadable; else return it."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(path, "it is absent")
    if isinstance(error, NotRegularError):
        return DamagedError(path, f"{error.strerror}")
    if error.errno in TRANSIENT_ERRNOS:
        return DamagedError(path, f"it cannot be read: {error.strerror}", unread=True)
    return error
