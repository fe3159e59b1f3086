"""Storage that fails for a while: reads are tried again, and what cannot be read is not taken for damaged in rows."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.regular import NotRegularError

T = TypeVar("T")

ROTTEN = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""What disks and file systems with checksums say of bytes that they have lost, and networks of what is away."""

PAUSES_S = (0.1, 0.4, 1.0, 2.0)
"""Before each further try of a read."""

MOST_S = 12.0
"""For all pauses of a start: many bad sectors are no reason to wait for each."""


class Unsteady:
    """What a process has met of it since its start."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self._left_s = MOST_S
        self._told: set[str] = set()
        self._unread = 0

    def read(self, read: Callable[[], T], name: Path | str) -> T:
        """Read, and try again where the storage fails.

        Raises:
            OSError: It fails all the same.
        """
        for pause_s in PAUSES_S:
            try:
                return read()
            except OSError as error:
                if error.errno not in ROTTEN or not self._may_wait(pause_s, name, error):
                    raise
            time.sleep(pause_s)
        return read()

    def hold(self, damaged: DamagedError) -> None:
        """Hold damage for which a checkpoint is about to be put aside to what was met before.

        Raises:
            CheckpointError: It is the second that cannot be read, which is the storage.
        """
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
            if str(name) not in self._told:
                self._told.add(str(name))
                print(f"WARNING: {name}: {error.strerror}; it is read again", file=sys.stderr)
            return True


unsteady = Unsteady()
"""That of this process."""


def damage(path: Path | str, error: OSError) -> OSError | DamagedError:
    """What an error of reading is: damage, where the disk has lost what it held; else an error of the storage."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(path, "it is absent")
    if isinstance(error, NotRegularError):
        return DamagedError(path, f"{error.strerror}")
    if error.errno in ROTTEN:
        return DamagedError(path, f"it cannot be read: {error.strerror}", unread=True)
    return error
