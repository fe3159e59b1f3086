"""Result type of a health check, and access to the files and programs of a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TOOL_LIMIT_S = 10.0  # limit for a program such as neuron-ls, which may hang next to a broken driver

TOOL_FOLDERS = "/opt/aws/neuron/bin:/opt/amazon/efa/bin:/usr/bin:/usr/sbin:/sbin"
"""Folders of vendors' and system tools that may be missing in a scheduler's PATH."""


@dataclass(frozen=True)
class Finding:
    """Result of one health check."""

    name: str
    ok: bool  # false: the check found a fault
    what: str  # observation, with values
    why: str = ""  # consequence for a run; empty without a fault
    fix: str = ""  # remedy; empty without a fault


def fault(name: str, what: str, why: str, fix: str) -> Finding:
    """Create the result of a check that found a fault."""
    return Finding(name, False, what, why, fix)


def passed(name: str, what: str) -> Finding:
    """Create the result of a check that found no fault."""
    return Finding(name, True, what)


class Host:
    """Access to the files and programs of a machine, or of a folder that simulates a machine in tests.

    Args:
        root: Folder that contains /proc, /sys, /dev and the other folders of the machine.
        path: Folders with programs, separated by colons; empty: those of PATH, and `TOOL_FOLDERS`.
    """

    def __init__(self, root: Path = Path("/"), path: str = "") -> None:
        self.root, self._path = root, path

    def at(self, path: str) -> Path:
        """Path of a machine's file or folder below `root`."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Read a small text file, stripped of blanks; empty if the file cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def run(self, *argv: str, limit_s: float = TOOL_LIMIT_S) -> str | None:
        """Run a program and return its standard output; None if the program is not installed.

        Raises:
            ToolError: The program failed or exceeded the time limit.
        """
        program = shutil.which(argv[0], path=self._path or f"{os.environ.get('PATH', '')}:{TOOL_FOLDERS}")
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *argv[1:]], capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"{argv[0]} gave no answer in {limit_s:g} seconds") from error
        except OSError as error:
            raise ToolError(f"{argv[0]} cannot be started: {error.strerror}") from error
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise ToolError(f"{argv[0]} ended with exit code {done.returncode}: {last}")
        return done.stdout


class ToolError(Exception):
    """Error of a program that a check runs: it cannot start, fails, or does not end in time."""
