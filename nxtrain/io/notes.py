"""Lines in the run folder that are not to be forgotten, on a disk that may be full for a while."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxtrain.io import jsonl


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
                jsonl.append(self.file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> list[dict[str, Any]]:
        """The lines of the file but those that are torn or spoilt."""
        return jsonl.read(self.file)
