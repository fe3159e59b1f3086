"""Result of one check, and access to the files and programs of a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TOOL_LIMIT_S = 10.0  # limit for a program such as neuron-ls, which may hang next to a broken driver

TOOL_FOLDERS = "/opt/aws/neuron/bin:/opt/amazon/efa/bin:/usr/bin:/usr/sbin:/sbin"
"""Folders of the tools, which the PATH of a scheduler may lack."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    ok: bool  # false: the check found a fault
    what: str  # observation, with values
    why: str = ""  # consequence for a run; empty if all is well
    fix: str = ""  # remedy; empty if all is well


def fault(name: str, what: str, why: str, fix: str) -> Finding:
    """Finding of a fault."""
    return Finding(name, False, what, why, fix)


def fine(name: str, what: str) -> Finding:
    """Finding without a fault."""
    return Finding(name, True, what)


class Host:
    """Access to this machine, or to a folder and programs that stand for a machine.

    Args:
        root: Folder under which /proc, /sys, /dev and the rest are.
        path: Folders with programs; empty: those of PATH, and `TOOL_FOLDERS`.
    """

    def __init__(self, root: Path = Path("/"), path: str = "") -> None:
        self.root, self._path = root, path

    def at(self, path: str) -> Path:
        """Path of a file or folder of the machine."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Text of a small file without blanks at its ends; empty if it cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def run(self, *argv: str, limit_s: float = TOOL_LIMIT_S) -> str | None:
        """Standard output of a program; None if it is not installed, a ToolError if it fails or takes too long."""
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
            raise ToolError(f"{argv[0]} ended with {done.returncode}: {last}")
        return done.stdout


class ToolError(Exception):
    """Failure of a program that a check needs."""
