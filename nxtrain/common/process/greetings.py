"""Suppression of gloo's connection messages: gloo prints one line per rank, and has no setting to stop it.

Source: `Context::connectFullMesh` in gloo/rendezvous/context.cc, writing to `std::cout` (torch 2.9).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import BinaryIO

_STDOUT = 1
_GREETING = b"[Gloo] Rank "


class _Held:
    """Buffer of this process's standard output while any thread creates process groups."""

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0
        self._before: int | None = None
        self._file: BinaryIO | None = None

    def begin(self) -> None:
        """Redirect standard output to a temporary file; a closed stream stays closed."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                with suppress(OSError):
                    self._before = os.dup(_STDOUT)
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
                    os.dup2(self._file.fileno(), _STDOUT)

    def end(self) -> None:
        """Restore standard output when the last user ends, and print the buffered lines except gloo's messages."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before is not None:
                with suppress(OSError):  # the reader is gone
                    os.dup2(self._before, _STDOUT)
                    self._show()
                os.close(self._before)
                self._before = None

    def _show(self) -> None:
        if self._file is None:
            return
        with self._file as file:
            file.seek(0)
            rest = b"".join(line for line in file if not line.startswith(_GREETING))
        self._file = None
        while rest:
            rest = rest[os.write(_STDOUT, rest) :]


_HELD = _Held()


@contextmanager
def suppress_gloo_messages() -> Iterator[None]:
    """Context that buffers standard output, and at its end prints all lines except gloo's connection messages."""
    _HELD.begin()
    try:
        yield
    finally:
        _HELD.end()
