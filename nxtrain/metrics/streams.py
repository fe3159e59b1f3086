"""Standard streams whose reader may go, as a pager, a terminal that is closed, or whoever followed a log."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class Outliving:
    """A stream that shows nothing from the moment on that nobody reads it; of other trouble it tells.

    Args:
        stream: Has a descriptor of the system.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """As the stream has it."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Show a text, if anybody reads."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._part(error)
            return len(text)

    def flush(self) -> None:
        """Show what waits, if anybody reads."""
        try:
            self._stream.flush()
        except OSError as error:
            self._part(error)

    def _part(self, error: OSError) -> None:
        """Show the rest to nobody, and let processes that are started from here do the same.

        Raises:
            OSError: It is another trouble, as a full disk under a file.
        """
        descriptor = self._stream.fileno()
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and stat.S_ISCHR(os.fstat(descriptor).st_mode)):
            raise error
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, descriptor)
        os.close(nobody)
        self._stream.flush()


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Let standard output and standard error outlive who reads them, where they are streams of the system."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _outliving(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # of which the interpreter tells when it ends
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO) -> TextIO | Outliving:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is a test's
        return stream
    return Outliving(stream)
