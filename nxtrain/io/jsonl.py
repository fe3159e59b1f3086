"""Files of JSON lines, appended to by processes that may be killed and on disks that may be full."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxtrain.io.regular import read_text


def append(file: Path, line: str) -> None:
    """Append a line and sync it to the disk; a torn last line of the file is ended first.

    Args:
        file: The file; its folder is made.
        line: JSON.

    Raises:
        OSError: The line cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b", buffering=0) as out:  # a failed write in a buffer would be tried again at close
        is_new = out.seek(0, os.SEEK_END) == 0
        if not is_new:
            out.seek(-1, os.SEEK_END)
        torn = not is_new and out.read(1) != b"\n"
        rest = memoryview(f"{chr(10) * torn}{line}\n".encode())
        while rest:
            rest = rest[out.write(rest) :]
        os.fsync(out.fileno())


def read(file: Path) -> list[dict[str, Any]]:
    """Objects of a file, one per line; torn or damaged lines are left out.

    Raises:
        OSError: The file exists and cannot be read.
    """
    if not file.exists():
        return []
    found = []
    for line in read_text(file, errors="replace").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


class JsonlLog:
    """A file of JSON lines; lines that cannot be written wait in memory, and are written before any later line.

    Args:
        file: The file; its folder is made.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: deque[str] = deque()

    def __len__(self) -> int:
        """Number of waiting lines."""
        return len(self._waiting)

    def add(self, line: Mapping[str, Any]) -> str:
        """Add a line and write all waiting lines; return the error that keeps lines waiting, or an empty string."""
        self._waiting.append(json.dumps(line, allow_nan=False))
        return self.write()

    def write(self) -> str:
        """Write all waiting lines; return the error that keeps lines waiting, or an empty string."""
        try:
            while self._waiting:
                append(self.file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> list[dict[str, Any]]:
        """Objects of the file; torn or damaged lines are left out."""
        return read(self.file)
