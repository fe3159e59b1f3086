"""Files of JSON lines that are added to, by processes that may be killed and on disks that may be full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nxtrain.io.regular import read_text


def append(file: Path, line: str) -> None:
    """Add a line for good; one that was left torn before it ends where it was torn.

    Args:
        file: Where; its folder is made.
        line: JSON.

    Raises:
        OSError: It cannot be written.
    """
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


def read(file: Path) -> list[dict[str, Any]]:
    """The objects of a file, one in each line; a line that is none, since it is torn or spoilt, is left out.

    Raises:
        OSError: It is there and cannot be read.
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
