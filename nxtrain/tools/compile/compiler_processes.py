"""Running compilers, recognised by their command lines, which name the entry of the cache that they work on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")

_PARENT_FIELD = 1
"""Position of the parent in `/proc/PID/stat`, counted after the command's name."""


def naming(entry: str) -> Iterator[int]:
    """Running processes, except this one, whose command line names an entry, as its compiler's does."""
    name = entry.encode()
    for process in PROC.glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and name in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:  # it has ended, or is another user's
            continue


def descends(pid: int, ancestor: int) -> bool:
    """True if a process is another one or descends from it through processes that still run."""
    while pid > 1 and pid != ancestor:
        try:
            text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        # The command's name stands in brackets and may itself hold blanks and brackets.
        pid = int(text.rpartition(")")[2].split()[_PARENT_FIELD])
    return pid == ancestor


def booted_s() -> float:
    """Boot time of this machine in seconds since the epoch; 0 if unknown."""
    try:
        lines = (PROC / "stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    for line in lines:
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
