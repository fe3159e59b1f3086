"""Lines in the run folder that are not to be forgotten, on a disk that may be full for a while."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Notes:
    """A file of JSON lines; what it cannot take now waits in memory, and is written before anything else.

    Args:
        file: Where; its folder is made.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: deque[str] = deque()

    def __len__(self) -> int:
        """How many lines wait."""
        return len(self._waiting)

    def add(self, line: Mapping[str, Any]) -> str:
        """Add a line, and tell why it waits; empty: it is on the disk, with all before it."""
        self._waiting.append(json.dumps(line, allow_nan=False))
        return self.write()

    def write(self) -> str:
        """Write what waits, and tell why something still does."""
        try:
            while self._waiting:
                _append(self.file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> list[dict[str, Any]]:
        """The lines of the file; of one that was left torn, none."""
        if not self.file.exists():
            return []
        found = []
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def _append(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b", buffering=0) as out:  # what fails in a buffer would be tried again when it is closed
        is_new = out.seek(0, os.SEEK_END) == 0
        if not is_new:
            out.seek(-1, os.SEEK_END)
        torn = not is_new and out.read(1) != b"\n"
        rest = memoryview(f"{chr(10) * torn}{line}\n".encode())
        while rest:
            rest = rest[out.write(rest) :]
        os.fsync(out.fileno())
