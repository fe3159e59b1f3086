"""Standard streams whose reader may go, as a pager, a terminal that is closed, or whoever followed a log."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

from nxtrain.errors import BackendError


class OutputError(BackendError, OSError):
    """Standard output or standard error that takes nothing more, as a file on a full disk."""


class Outliving:
    """A stream that shows nothing more once nobody reads it; other trouble ends the command.

    Args:
        stream: Has a descriptor of the system.
        carries_results: A full disk ends the command; otherwise each line that fails is an OSError of its own.
    """

    def __init__(self, stream: TextIO, *, carries_results: bool = False) -> None:
        self._stream, self._carries_results = stream, carries_results
        self._failure: OutputError | None = None

    def __getattr__(self, name: str) -> Any:
        """As the stream has it."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Show a text, if anybody reads."""
        self._refuse()
        try:
            return self._stream.write(text)
        except OSError as error:
            self._part(error)
            return len(text)

    def flush(self) -> None:
        """Show what waits, if anybody reads."""
        self._refuse()
        try:
            self._stream.flush()
        except OSError as error:
            self._part(error)

    def _refuse(self) -> None:
        if self._failure is not None:  # libraries try a stream, and drop what it raises
            raise self._failure

    def _part(self, error: OSError) -> None:
        """Discard the rest where nobody reads it.

        Raises:
            OutputError: Results meet another trouble, as a full disk under a file.
            OSError: The same of other lines.
        """
        descriptor = self._stream.fileno()
        is_gone = error.errno == errno.EPIPE or (
            error.errno == errno.EIO and stat.S_ISCHR(os.fstat(descriptor).st_mode)
        )
        if not is_gone and not self._carries_results:
            raise error
        _discard(self._stream)
        if not is_gone:
            self._failure = OutputError(f"standard output cannot be written: {error.strerror}; send it elsewhere")
            raise self._failure from error


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Let standard output and standard error outlive who reads them, where they are streams of the system."""
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _outliving(sys.stdout, carries_results=True))
    sys.stderr = cast(TextIO, _outliving(sys.stderr))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):
                _end(stream)
        sys.stdout, sys.stderr = before


def _end(stream: TextIO) -> None:
    """Show what waits; what cannot be shown is dropped, or the interpreter would end with a code of its own."""
    try:
        stream.flush()
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Show what waits, and all that comes, to nobody, and let processes that are started from here do the same."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, stream.fileno())
    os.close(nobody)
    stream.flush()


def open_standard_streams() -> None:
    """Connect standard streams that are closed to the null device, or the next file would take their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest descriptor that is free
            stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _outliving(stream: TextIO, *, carries_results: bool = False) -> TextIO | Outliving:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is a test's
        return stream
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")  # a terminal may show fewer characters than a text has
    return Outliving(stream, carries_results=carries_results)
