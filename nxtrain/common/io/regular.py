"""Opening of regular files only. A FIFO, a socket or a device at the path raises an error.

A plain open of a FIFO waits for a writer, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """Error for a path that is a FIFO, socket or device instead of a regular file."""


def require_regular(path: Path) -> None:
    """Raise an error unless the path is a regular file; for use before a library opens the path."""
    _require(path, os.stat(path).st_mode)


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading, and return its descriptor; a symbolic link is followed."""
    require_regular(path)
    # Another file may take the name before the open: O_NONBLOCK keeps it from waiting; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        _require(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Read the content of a regular file."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """Read the UTF-8 text of a regular file, with universal newlines, and without the mark that editors put first."""
    with open(open_regular(path), encoding="utf-8-sig", errors=errors) as file:
        return file.read()


def kind_of(mode: int) -> str:
    """Description of a file that is not regular, such as `a FIFO`, by its mode; empty for regular files and folders."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def _require(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, f"it is {kind_of(mode) or 'no file'}, not a regular file", str(path))
