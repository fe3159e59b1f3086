"""Standard streams that survive the exit of their reader, such as a pager or a terminal."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

from nxtrain.common.errors import BackendError


class OutputError(BackendError, OSError):
    """Error of writing standard output or standard error, for example to a file on a full disk."""


class PipeSafeStream:
    """A stream that drops its output once its pipe or terminal is closed; other errors end the command.

    With `carries_results`, an error of the stream is raised as an `OutputError`, at this write and at all later writes.
    """

    def __init__(self, stream: TextIO, *, carries_results: bool = False) -> None:
        self._stream, self._carries_results = stream, carries_results
        self._failure: OutputError | None = None

    def __getattr__(self, name: str) -> Any:
        """Attribute of the wrapped stream."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it if the reader has exited."""
        self._refuse()
        try:
            return self._stream.write(text)
        except OSError as error:
            self._handle(error)
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop its content if the reader has exited."""
        self._refuse()
        try:
            self._stream.flush()
        except OSError as error:
            self._handle(error)

    def _refuse(self) -> None:
        if self._failure is not None:  # raised at each call, since libraries may ignore errors of a stream
            raise self._failure

    def _handle(self, error: OSError) -> None:
        """Discard all further output if the reader has exited; raise any other error."""
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
def pipe_safe_streams() -> Iterator[None]:
    """Context in which standard output and standard error survive the exit of their readers.

    Streams without a file descriptor are left unchanged.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _pipe_safe(sys.stdout, carries_results=True))
    sys.stderr = cast(TextIO, _pipe_safe(sys.stderr))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):
                try:
                    stream.flush()
                except OSError:  # a buffer that stays full would make the interpreter exit with code 120
                    _discard(stream)
        sys.stdout, sys.stderr = before


def _discard(stream: TextIO) -> None:
    """Redirect a stream's descriptor to the null device, for child processes too, and flush the buffer there."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, stream.fileno())
    os.close(nobody)
    stream.flush()


def open_standard_streams() -> None:
    """Connect closed standard streams to the null device, since the next opened file would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest descriptor that is free
            stream = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _pipe_safe(stream: TextIO, *, carries_results: bool = False) -> TextIO | PipeSafeStream:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):  # the stream is absent, or one of a test
        return stream
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")  # a terminal may show fewer characters than a text has
    return PipeSafeStream(stream, carries_results=carries_results)
