"""Rows of a corpus: the documents of its files, and rows that hold none, each with the place behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from nxtrain.data.arrow.sources import Source
from nxtrain.data.files import unreadable
from nxtrain.errors import DataError
from nxtrain.io.regular import open_regular

MAX_DOCUMENT_BYTES = 256 << 20
"""Longest document; a longer one would not fit the memory that a preparation promises."""

CHUNK_BYTES = 1 << 20
"""Bytes of text that are read at once."""

INVALID_UTF8 = "invalid UTF-8"
BROKEN_JSON = "broken JSON"
MISSING_FIELD = "missing field"
WRONG_TYPE = "wrong type"
TOO_LONG = "too long"
BINARY = "binary"
DAMAGED = "truncated or damaged"


class Row(NamedTuple):
    """A document.

    Args:
        text: The document in UTF-8.
        row: Number of the row in its file, from 1.
        offset: Bytes of the uncompressed file up to the end of the row; 0 for tables.
        prompt: Bytes of the prompt, with which the text begins.
    """

    text: bytes
    row: int
    offset: int
    prompt: int = 0


class BadRow(NamedTuple):
    """Rows without a document.

    Args:
        row: Number of the last of them in the file, from 1.
        offset: Bytes of the uncompressed file up to their end; 0 for tables.
        reason: Kind of the defect.
        detail: The defect, with the values and the way out.
        num_rows: Number of rows.
    """

    row: int
    offset: int
    reason: str
    detail: str
    num_rows: int = 1


@dataclass
class Progress:
    """Position of a reader in a file as it lies on the disk.

    Attributes:
        num_bytes: Bytes that the reader has passed, at most the size of the file.
    """

    num_bytes: int = 0


class _BadRowError(Exception):
    """Row without a document: reason and detail."""


DEFECTS = (OSError, pa.ArrowException, UnicodeDecodeError, SystemError)
"""Errors of pyarrow for a file that it cannot read; the last ones for names of columns and for negative lengths."""


def is_damage(error: Exception) -> bool:
    """True for damaged content, False for a storage that fails; pyarrow raises OSError for both."""
    return not isinstance(error, OSError) or isinstance(error, pa.ArrowException) or error.errno is None


def text_rows(
    source: Source, field: str, lines: bool, start: tuple[int, int], progress: Progress, prompt: str = ""
) -> Iterator[Row | BadRow]:
    """Rows of a text file or of JSON lines, compressed or not, behind a place.

    A text file is one row, or, with `lines`, each of its lines that is not blank. Blank lines of JSON lines are no
    rows.

    Args:
        source: The file.
        field: Field of a JSON object that holds the document.
        lines: Each line of a text file is a document.
        start: Row and offset of the last row that is not wanted again.
        progress: Gets the position of the reader.
        prompt: Field of a JSON object that holds the prompt, which comes before the document; empty: none.

    Raises:
        DataError, StorageError: The file cannot be read.
    """
    row, offset = start
    try:
        with _opened(source) as (file, raw):
            _skip(file, source, offset)
            if source.kind == "text" and not lines:
                if not row:
                    yield _whole(file)
                    progress.num_bytes = source.size
                return
            fields = (prompt, field) if prompt else (field,)
            for line, end in split_lines(file, offset):
                begin, offset = offset, end
                progress.num_bytes = min(source.size, raw.tell())
                try:
                    if line is None:
                        raise _BadRowError(TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document")
                    content = line if begin else line.removeprefix(b"\xef\xbb\xbf")
                    if not content.strip():
                        continue
                    row += 1
                    parts = [_plain_line(content)] if source.kind == "text" else _json_texts(content, fields)
                    yield Row(b"".join(parts), row, offset, len(parts[0]) if prompt else 0)
                except _BadRowError as error:
                    row += line is None
                    yield BadRow(row, offset, *error.args)
    except (OSError, pa.ArrowException) as error:
        if not is_damage(error):
            assert isinstance(error, OSError)
            raise unreadable(f"{source.path}", error) from error
        yield BadRow(row + 1, offset, DAMAGED, f"{error}; fetch or compress the file again")


@contextmanager
def _opened(source: Source) -> Iterator[tuple[Any, Any]]:
    """Open a file that may be compressed: the uncompressed stream, and the file on the disk."""
    with open(open_regular(source.path), "rb", buffering=0) as raw:
        if not source.compression:
            yield raw, raw
            return
        file = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), source.compression)
        try:
            yield file, raw
        finally:
            with suppress(OSError, pa.ArrowException):  # a damaged end is an error of read, and of close again
                file.close()


def _skip(file: Any, source: Source, offset: int) -> None:
    """Advance a stream to an offset: a plain file by a seek, a compressed one by reading."""
    if not source.compression:
        file.seek(offset)
        return
    while offset:
        passed = len(file.read(min(offset, CHUNK_BYTES)))
        if not passed:
            raise DataError(f"{source.path} is shorter than when its preparation began; begin again with --restart")
        offset -= passed


def split_lines(
    file: Any, offset: int, limit: int = MAX_DOCUMENT_BYTES, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[bytes | None, int]]:
    """Lines of a binary stream, each with the offset behind it; None stands for a line above the limit.

    Args:
        file: The stream.
        offset: Bytes before the stream's position.
        limit: Longest line in bytes.
        chunk_bytes: Bytes that are read at once.
    """
    held: list[bytes] = []  # pieces of a line whose end is not read yet
    num_held, is_long = 0, False
    while chunk := file.read(chunk_bytes):
        first, *others = bytes(chunk).split(b"\n")
        num_held += len(first)
        is_long = is_long or num_held > limit
        if is_long:
            held.clear()
        else:
            held.append(first)
        if not others:
            continue
        offset += num_held + 1
        yield None if is_long else b"".join(held), offset
        for line in others[:-1]:
            offset += len(line) + 1
            yield (line if len(line) <= limit else None), offset
        held, num_held, is_long = [others[-1]], len(others[-1]), len(others[-1]) > limit
    if num_held:
        yield None if is_long else b"".join(held), offset + num_held


def _whole(file: Any) -> Row | BadRow:
    """Row of a text file that is one document."""
    pieces, num_bytes = [], 0
    while chunk := file.read(CHUNK_BYTES):
        pieces.append(bytes(chunk))
        num_bytes += len(chunk)
        if num_bytes > MAX_DOCUMENT_BYTES:
            way_out = "give --lines if each line is a document, or split the file"
            return BadRow(1, 0, TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; {way_out}")
    content = b"".join(pieces).removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:
        return BadRow(1, num_bytes, BINARY, "the file holds a NUL byte, so it is no text; remove it from the sources")
    try:
        return Row(valid_utf8(content), 1, num_bytes)
    except _BadRowError as error:
        return BadRow(1, num_bytes, *error.args)


def valid_utf8(content: bytes) -> bytes:
    """Content that is valid UTF-8, unchanged."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is 0x{content[error.start]:02x} ({error.reason}); convert it with iconv -t utf-8"
        raise _BadRowError(INVALID_UTF8, detail) from None
    return content


def bad_utf8(content: bytes) -> str:
    """Defect of text that is not UTF-8; empty for valid text."""
    try:
        valid_utf8(content)
    except _BadRowError as error:
        return str(error.args[1])
    return ""


def _plain_line(line: bytes) -> bytes:
    return valid_utf8(line.removesuffix(b"\r"))


def _json_texts(line: bytes, fields: Sequence[str]) -> list[bytes]:
    """Texts of fields of a line of JSON, in UTF-8."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        valid_utf8(line)  # raises
        raise
    except (RecursionError, ValueError) as error:
        raise _BadRowError(BROKEN_JSON, f"{error}" or "nested too deep") from None
    if not isinstance(record, dict):
        wanted = ", ".join(f'"{field}": "..."' for field in fields)
        raise _BadRowError(WRONG_TYPE, f"{_kind(record)}, not an object such as {{{wanted}}}")
    return [_json_text(record, field) for field in fields]


def _json_text(record: dict[str, Any], field: str) -> bytes:
    text = record.get(field)
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            detail = f'"{field}" holds half of a surrogate pair at character {error.start}'
            raise _BadRowError(INVALID_UTF8, detail) from None
    if text is None:
        fields = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise _BadRowError(MISSING_FIELD, f'no "{field}"; fields: {fields}; choose one with --field')
    raise _BadRowError(WRONG_TYPE, f'"{field}" is {_kind(text)}, not a string')


def _kind(value: object) -> str:
    """Type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
