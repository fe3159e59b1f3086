"""Lock that allows one run at a time in a folder, since two runs would delete each other's checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nxtrain.common.errors import BackendError, RestartError
from nxtrain.common.run_folder import LOCK_FILE
from nxtrain.metrics.run_observer import RunObserver, Work

ENDING_S = 5.0
"""Seconds to wait for a lock holder on this machine, which may be about to end."""

DYING_S = 60.0
"""Seconds that a restart waits for a lock holder on this machine, which may still free memory or wait for a disk."""

AWAY_S = 100.0
"""Seconds to wait for a lock holder on another machine; NFS 4 servers free a lost client's locks after 90 s."""

_LOOK_S = 0.2


class RunLock(RunObserver):
    """Lock of a run's folder, held by an open file; it is taken again if the folder was deleted or moved meanwhile.

    Args:
        folder: Folder of the run.
        file: Descriptor of the locked file; None without a lock.
    """

    def __init__(self, folder: Path, file: int | None) -> None:
        self._folder, self._file = folder, file

    def enter(self, step: int, work: Work) -> None:
        """Check the lock before files are written.

        Raises:
            BackendError: The folder was deleted or moved, and another run has locked the new folder of that name.
        """
        if work not in {"log", "checkpoint"} or self._file is None:
            return
        path, held = self._folder / LOCK_FILE, os.fstat(self._file)
        with suppress(OSError):
            if os.path.samestat(held, os.stat(path)):
                return
        try:
            file = _open(path)
        except OSError:  # the folder is gone, and the next checkpoint creates it
            return
        if os.path.samestat(held, os.fstat(file)):  # only the call failed, of storage that is unsteady
            os.close(file)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            host, pid = _holder(file)
            os.close(file)
            holder = f"process {pid} on {host or 'a machine that it does not name'}"
            raise BackendError(
                f"run.dir={self._folder} was deleted or moved under this run, and {holder} uses a new folder of that "
                "name. This run ends, since two runs would destroy each other's checkpoints"
            ) from error
        except OSError:  # the file system has no locks any more
            os.close(file)
            return
        _sign(file)
        os.close(self._file)
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)


@contextmanager
def only_run(
    folder: Path, print_line: Callable[[str], None], *, restarted: bool = False, most_s: float = AWAY_S
) -> Iterator[RunLock]:
    """Lock the folder of a run within this context; the system releases the lock when this process ends in any way.

    Args:
        folder: Folder of the run.
        print_line: Prints a line for the user.
        restarted: This start replaces a start that failed.
        most_s: Most seconds to wait, since other ranks wait for this rank.

    Raises:
        BackendError: Another run holds the lock.
        RestartError: The lock is held, possibly by a process of the failed start that `restarted` replaces.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open(folder / LOCK_FILE)
    except OSError:  # a folder that cannot be written is reported by later checks
        yield RunLock(folder, None)
        return
    try:
        is_taken = _take(file, folder, print_line, restarted=restarted, most_s=most_s)
    except BaseException:
        os.close(file)
        raise
    if is_taken:
        _sign(file)
    else:
        os.close(file)
    lock = RunLock(folder, file if is_taken else None)
    try:
        yield lock
    finally:
        lock.release()


def _sign(file: int) -> None:
    """Write the holder of the lock to its file."""
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n"
    with suppress(OSError):  # another user's read-only file is locked all the same
        os.ftruncate(file, 0)
        os.pwrite(file, content.encode(), 0)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # the file belongs to another user
        return os.open(path, os.O_RDONLY)


def _take(file: int, folder: Path, print_line: Callable[[str], None], *, restarted: bool, most_s: float) -> bool:
    """Lock the file; return False on a file system without locks, which is not a reason to refuse a run."""
    began, announced = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            host, pid = _holder(file)
            limit_s = AWAY_S
            if host == socket.gethostname():
                limit_s = DYING_S if restarted else ENDING_S
            limit_s = min(limit_s, most_s)
            holder = f"process {pid} on {host or 'a machine that it does not name'}"
            if time.monotonic() - began > limit_s:
                lock = folder / LOCK_FILE
                kind = RestartError if restarted else BackendError
                raise kind(
                    f"run.dir={folder} is in use by {holder}, and two runs would destroy each other's checkpoints. "
                    f"Wait for its end, stop it, or use another run.dir. If that process does not exist, delete {lock}"
                ) from error
            if not announced:
                print_line(f"run.dir={folder} is in use by {holder}; this run waits up to {limit_s:.0f} s for its end")
            announced = True
            time.sleep(_LOOK_S)
        except OSError as error:
            print_line(
                f"WARNING: run.dir={folder} cannot be locked: {error.strerror}; see to it that no other run uses it"
            )
            return False


def _holder(file: int) -> tuple[str, int]:
    """Host and process id of the lock's holder; empty and 0 if the lock file does not contain them."""
    try:
        content = json.loads(os.pread(file, 4096, 0))
        return str(content["host"]), int(content["pid"])
    except (OSError, RecursionError, ValueError, KeyError, TypeError):
        return "", 0
