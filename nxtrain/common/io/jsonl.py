"""JSON lines files whose writers may be killed, and whose disks may be full."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from nxtrain.common.io.atomic import replacing
from nxtrain.common.io.regular import open_regular


def append(file: Path, line: str) -> None:
    """Append a line to a file, and sync the file to the disk. An incomplete last line is first ended by a line feed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(file) as out:
        is_new = out.seek(0, os.SEEK_END) == 0
        if not is_new:
            out.seek(-1, os.SEEK_END)
        torn = not is_new and out.read(1) != b"\n"
        write_line(out, f"{chr(10) * torn}{line}")
        os.fsync(out.fileno())


def open_to_append(file: Path) -> BinaryIO:
    """Open a file for `write_line`, creating it if absent."""
    return file.open("a+b", buffering=0)  # a failed write in a buffer would be repeated


def write_line(out: BinaryIO, line: str) -> None:
    """Append a JSON line to an open file, without a sync."""
    rest = memoryview(f"{line}\n".encode())
    while rest:
        rest = rest[out.write(rest) :]


def read(file: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one per line; incomplete or damaged lines are left out."""
    return [*each(file)]


def each(file: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the JSON objects of a file, one per line; incomplete or damaged lines are left out."""
    if not file.exists():
        return
    with open(open_regular(file), "rb") as lines:
        yield from (content for _, _, content in _objects(lines))


def parse(text: str | bytes) -> dict[str, Any] | None:
    """Parse a JSON object from a UTF-8 text; None if the text is anything else."""
    try:
        content = json.loads(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_begun(tail: bytes) -> bool:
    """True if the bytes after a file's last line feed may begin a JSON object that is being written."""
    return tail.startswith(b"{") and tail.isascii() and tail.decode().isprintable()


def truncate_after(file: Path, key: str, last: int) -> None:
    """Truncate a JSON lines file after the record whose value under `key`, such as `step`, is `last`.

    Only whole lines are kept whose integer under `key` is above that of the previous kept line.

    Lines at the end are truncated in place, which needs no disk space. Otherwise the file is replaced atomically, so
    that a crash loses no line.
    """
    whole, is_whole = 0, True
    with open(open_regular(file), "rb") as old:
        for start, line in _rising(old, key, last):
            is_whole = start == whole and line.endswith(b"\n")
            if not is_whole:
                break
            whole += len(line)
    if is_whole:
        os.truncate(file, whole)
        return
    with replacing(file, durable=True) as draft, file.open("rb") as old, draft.open("wb") as new:
        new.writelines(line.rstrip(b"\n") + b"\n" for _, line in _rising(old, key, last))


class JsonlLog:
    """A JSON lines file with a queue: lines that cannot be written wait in memory until the next attempt."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: deque[str] = deque()

    def __len__(self) -> int:
        """Number of queued lines that are not written yet."""
        return len(self._waiting)

    def add(self, line: Mapping[str, Any]) -> str:
        """Queue a line and write all queued lines; return the error that prevents writing, or an empty string."""
        self._waiting.append(json.dumps(line, allow_nan=False))
        return self.write()

    def write(self) -> str:
        """Write all queued lines; return the error that prevents writing, or an empty string."""
        try:
            while self._waiting:
                append(self.file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> list[dict[str, Any]]:
        """Read the JSON objects of the file; incomplete or damaged lines are left out."""
        return read(self.file)


def _objects(file: BinaryIO) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Iterate over the undamaged lines of a file, as tuples of byte offset, line, and JSON object."""
    start = 0
    for line in file:
        content = parse(line)
        if content is not None:
            yield start, line, content
        start += len(line)


def _rising(file: BinaryIO, key: str, last: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines that `truncate_after` keeps, as pairs of byte offset and line."""
    before = -1
    for start, line, content in _objects(file):
        try:
            number = int(content[key])
        except (ValueError, TypeError, KeyError):
            continue
        if before < number <= last:
            before = number
            yield start, line
