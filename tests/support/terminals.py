"""Commands on a terminal of their own, and what the screen of one shows at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.patience import patient_s

_PARTS = re.compile(r"\x1b\[(?P<codes>[?\d;]*)(?P<kind>[A-Za-z])|(?P<move>[\r\n])|(?P<text>[^\x1b\r\n]+)")


@dataclass(frozen=True)
class Shown:
    """Output of a command on a terminal.

    Args:
        code: Exit code.
        raw: Everything written, with the terminal's control sequences.
    """

    code: int
    raw: str

    @property
    def states(self) -> list[list[str]]:
        """The screen after each change, as lines without the spaces at their ends."""
        return _play(self.raw)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen at the end, without blank ones."""
        return [line for line in (self.states or [[]])[-1] if line]


def on_terminal(
    argv: Sequence[str], *, cwd: Path, columns: int = 100, limit_s: float = 120.0, environ: Mapping[str, str] = {}
) -> Shown:
    """Run a command whose standard streams are a terminal.

    Raises:
        TimeoutError: The command takes longer than `limit_s`; it is killed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    variables |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ}
    process = subprocess.Popen(
        list(argv), cwd=cwd, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    written, limit = b"", time.monotonic() + patient_s(limit_s)
    try:
        while time.monotonic() < limit:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux: nobody holds the other side any more
                part = b""
            if not part:
                return Shown(process.wait(patient_s(10)), written.decode())
            written += part
        raise TimeoutError(f"{argv} is not done after {limit_s:g} seconds: {written.decode()}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _play(raw: str) -> list[list[str]]:
    """The screen after each text, for the sequences that rich writes for a bar of one or more lines."""
    screen, row, column = [""], 0, 0
    states = []
    for part in _PARTS.finditer(raw):
        kind = part["kind"]
        if part["move"] == "\r":
            column = 0
        elif part["move"] == "\n":
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif kind == "A":
            row = max(0, row - int(part["codes"] or 1))
        elif kind == "K":
            screen[row] = "" if part["codes"] == "2" else screen[row][:column]
        elif kind in {"m", "h", "l"}:
            continue
        elif part["text"]:
            line = screen[row].ljust(column)
            screen[row] = line[:column] + part["text"] + line[column + len(part["text"]) :]
            column += len(part["text"])
            states.append([line.rstrip() for line in screen])
        else:
            raise AssertionError(f"a sequence that no screen of this test knows: {part[0]!r}")
    return states
