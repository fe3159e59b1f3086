"""Retries of reads from storage that fails for a while, and the difference between unreadable and damaged files."""

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

ROTTEN = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""Errors of disks and checksumming file systems for lost bytes, and of network file systems for lost connections."""

PAUSES_S = (0.1, 0.4, 1.0, 2.0)
"""Seconds of pause before each retry of a read."""

MOST_S = 12.0
"""Total seconds of pauses in one start, so that many bad sectors do not each cost a wait."""


class RetryBudget:
    """Pauses left for retries of reads, and number of unreadable files, since the start of a process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.begin()

    def begin(self) -> None:
        """Reset all counts."""
        self._left_s = MOST_S
        self._warned: set[str] = set()
        self._unread = 0

    def read(self, read: Callable[[], T], name: Path | str) -> T:
        """Call a read function, and retry errors of the storage."""
        for pause_s in PAUSES_S:
            try:
                return read()
            except OSError as error:
                if error.errno not in ROTTEN or not self._may_wait(pause_s, name, error):
                    raise
            time.sleep(pause_s)
        return read()

    def hold(self, damaged: DamagedError) -> None:
        """Refuse to quarantine a second unreadable checkpoint: two in one start mean that the storage fails."""
        self._unread += damaged.unread
        if damaged.unread and self._unread > 1:
            raise CheckpointError(
                f"{damaged.file}: {damaged.reason}, and another checkpoint could not be read either: it is the storage "
                "that fails, so that no more are put aside. Start again when it is back"
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


unsteady = RetryBudget()
"""Retry budget of this process."""


def damage(path: Path | str, error: OSError) -> OSError | DamagedError:
    """Translate an error of reading into damage if the file is absent, irregular or lost; else return it."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(path, "it is absent")
    if isinstance(error, NotRegularError):
        return DamagedError(path, f"{error.strerror}")
    if error.errno in ROTTEN:
        return DamagedError(path, f"it cannot be read: {error.strerror}", unread=True)
    return error
