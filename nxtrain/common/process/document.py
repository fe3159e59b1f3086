"""Standard output that carries exactly one JSON document, whatever libraries and child processes print."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO, cast

from nxtrain.common.process.streams import PipeSafeStream

STANDARD_ERROR = 2
"""File descriptor of standard error."""


class DocumentStream:
    """Replacement of standard output for a command that prints one document; all other output goes to standard error.

    The file descriptor is redirected to standard error too, for C libraries and child processes. The descriptor stays
    redirected until the process ends, since a C library may write its buffer only then.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._redirected = stream, -1
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # a stream of a test
            return
        stream.flush()
        copy = os.fdopen(os.dup(descriptor), "w", encoding=stream.encoding, errors=stream.errors)
        os.dup2(STANDARD_ERROR, descriptor)
        self._stream, self._redirected = cast(TextIO, PipeSafeStream(copy, carries_results=True)), descriptor

    def __getattr__(self, name: str) -> Any:
        """Attribute of the standard error stream."""
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        """Write a text to standard error."""
        return sys.stderr.write(text)

    def write_document(self, text: str) -> None:
        """Write the document to the original standard output."""
        self._stream.write(text)
        self._stream.flush()

    def restore(self) -> None:
        """Restore the file descriptor of standard output, for a program that replaces this process."""
        if self._redirected >= 0:
            os.dup2(self._stream.fileno(), self._redirected)


def reserve_output() -> None:
    """Reserve standard output for the document of a command, until the command ends."""
    sys.stdout = cast(TextIO, DocumentStream(sys.stdout))


def restore_output() -> None:
    """Restore standard output before `execve`, since the next program reserves its own."""
    if isinstance(sys.stdout, DocumentStream):
        sys.stdout.restore()


def write_document(content: object) -> None:
    """Print the result of a command to standard output as JSON."""
    text = json.dumps(content, indent=2) + "\n"
    if isinstance(sys.stdout, DocumentStream):
        sys.stdout.write_document(text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
