"""Terminal console of a run. The run continues without output if the reader of its output exits."""

from __future__ import annotations

import sys
from functools import partial
from typing import TextIO

from rich.console import Console


class PipeSafeConsole(Console):
    """A rich console that drops its output when its pipe is closed, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, on which `_check_buffer` drops the output."""
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        # All output of rich passes here, frames of a live bar too.
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]


_ON_STANDARD_ERROR = partial(PipeSafeConsole, stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

_SHARED: list[tuple[TextIO, PipeSafeConsole]] = []
"""Standard error stream and its console. If the stream is replaced, a new console is created."""


def standard_error(*, quiet: bool = False) -> PipeSafeConsole:
    """Console on standard error for messages to users, without wrapping, highlighting, markup and emoji codes.

    Paths and texts of libraries may have brackets, which markup would drop or refuse.

    All callers share one console. A live progress bar of this console stays below the printed lines.
    """
    if quiet:
        return _ON_STANDARD_ERROR(quiet=True)
    # A live bar replaces standard error by a proxy of it.
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    if not _SHARED or _SHARED[0][0] is not stream:
        _SHARED[:] = [(stream, _ON_STANDARD_ERROR())]
    return _SHARED[0][1]
