"""Rows of a corpus's source files, with their documents or defects, and the file position after each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from nxtrain.common.errors import DataError, cause_of
from nxtrain.data.arrow.sources import Source
from nxtrain.data.storage import open_stream, unreadable

MAX_DOCUMENT_BYTES = 256 << 20
"""Maximum bytes of a document, which bounds the memory of a preparation."""

CHUNK_BYTES = 1 << 20
"""Bytes of text that are read in one call."""

SECTION_BYTES = 1 << 16
"""Maximum bytes of a section, for text files that are read in sections."""

INVALID_UTF8 = "invalid UTF-8"
BROKEN_JSON = "broken JSON"
MISSING_FIELD = "missing field"
WRONG_TYPE = "wrong type"
TOO_LONG = "too long"
BINARY = "binary"
DAMAGED = "truncated or damaged"


class SourceRow(NamedTuple):
    """A document from a row of a source file, with the file position after the row.

    Args:
        text: The document in UTF-8.
        row: Number of the row in its file, from 1.
        offset: Offset of the end of the row in the uncompressed file; 0 for tables.
        prompt: Byte length of the prompt at the beginning of the text.
        is_last: This is the last document of the row.
        continues: The text is a section of a file that continues in the next row.
        is_desirable: Label of an answer: True if it is desirable.
    """

    text: bytes
    row: int
    offset: int
    prompt: int = 0
    is_last: bool = True
    continues: bool = False
    is_desirable: bool = False


class BadRow(NamedTuple):
    """One or more adjacent rows of a source file that have no usable document.

    Args:
        row: Number of the last row in the file, from 1.
        offset: Offset of the end of the last row in the uncompressed file; 0 for tables.
        detail: Description of the defect, with the values and a solution.
    """

    row: int
    offset: int
    reason: str
    detail: str
    num_rows: int = 1


class BadRowError(Exception):
    """Error of a row without a usable document, with its reason and detail."""


ReadProgress: TypeAlias = Callable[[int], None]
"""Callback with the number of bytes that a reader has read so far."""

ChatWriter: TypeAlias = Callable[[object, object], Iterator[tuple[bytes, int]]]
"""Function that converts a conversation and its tools to documents, each with the byte length of its prompt.

Raises a BadRowError for an unusable conversation.
"""

AnswersWriter: TypeAlias = Callable[[Sequence[Any], object], Iterator[tuple[bytes, int]]]
"""Function that converts the answers of a row to documents, given its prompt or None and two values, and its tools.

Raises a BadRowError for an unusable row.
"""

PAIR = ("chosen", "rejected")
LABELLED = ("completion", "label")
"""Fields of a row with a labelled answer, after its prompt. `PAIR` has the fields of a row with two answers."""

TOOLS = "tools"
"""Optional field of a row with a conversation: the tools that the template describes to the model."""


@dataclass(frozen=True)
class Fields:
    """Fields or columns of a source row from which documents are made.

    Args:
        text: Field of the documents, or of the conversations.
        prompt: Field of the prompts, each of which precedes its document; empty for none.
        chat: Function that converts conversations; None if the field is text.
        sections: Text files are read in sections, so that a file of any size fits in memory.
        answers: Function that converts the answers in the fields `values`; None for other documents.
        values: `PAIR` or `LABELLED`, for answers.
        tools: `TOOLS` for conversations; empty for other documents, or if the source has no such column.
    """

    text: str
    prompt: str = ""
    chat: ChatWriter | None = None
    sections: bool = False
    answers: AnswersWriter | None = None
    values: tuple[str, str] = PAIR
    tools: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, in their order in the document."""
        values = (self.text,) if self.answers is None else self.values
        return tuple(filter(None, (self.prompt, *values, self.tools)))

    def option(self, name: str) -> str:
        """Option of the command that names a field."""
        return "--prompt" if self.prompt and name == self.prompt else "--field"

    def rows(self, values: Sequence[Any], row: int, offset: int) -> Iterator[SourceRow]:
        """Convert the field values of one source row to documents.

        Args:
            values: Values of the fields: texts in UTF-8, a conversation, or a prompt and answers; then the tools.
        """
        if self.chat is None and self.answers is None:
            num_prompt = 0
            if self.prompt:
                num_prompt = len(values[0])
            yield SourceRow(b"".join(values), row, offset, num_prompt)
            return
        tools = None
        if self.tools:
            *values, tools = values
        if self.answers is not None:
            documents = list(self.answers([*[None] * (3 - len(values)), *values], tools))
        else:
            assert self.chat is not None
            documents = list(self.chat(values[0], tools)) or [(b"", 0)]
        for number, (text, prompt) in enumerate(documents, 1):
            is_desirable = self.values == LABELLED and values[-1] is True
            is_last = number == len(documents)
            yield SourceRow(text, row, offset, prompt, is_last=is_last, is_desirable=is_desirable)


DEFECTS = (OSError, EOFError, pa.ArrowException, UnicodeDecodeError, SystemError)
"""Exceptions of pyarrow for unreadable files. The last two are for column names and for negative lengths."""


def is_damage(error: Exception) -> bool:
    """True if an OSError of pyarrow means damaged content, False if it means failing storage."""
    return not isinstance(error, OSError) or isinstance(error, pa.ArrowException) or error.errno is None


def text_rows(
    source: Source, fields: Fields, lines: bool, start: tuple[int, int], progress: ReadProgress
) -> Iterator[SourceRow | BadRow]:
    """Iterate over the rows of a text or JSON lines file, compressed or not, after a position.

    A text file is one row. With `lines`, each of its lines that is not blank is a row. With `fields.sections`, each
    section is a row, and all but the last continue. Blank lines of JSON lines files are not rows.

    Args:
        start: Row and offset of the last row to skip.
        progress: Called before each row with the number of file bytes read.
    """
    row, offset = start
    try:
        with _opened(source) as (file, raw):
            if source.kind == "text" and fields.sections:
                for section in _section_rows(file, row):
                    row, offset = section.row, section.offset
                    progress(min(source.size, raw.tell()))
                    yield section
                return
            if source.kind == "text" and not lines:
                if not row:
                    progress(source.size)
                    yield _whole(file)
                return
            for line, end in _lines_after(file, source, offset):
                begin, offset = offset, end
                progress(min(source.size, raw.tell()))
                try:
                    if line is None:
                        raise BadRowError(TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document")
                    content = line
                    if not begin:
                        content = line.removeprefix(b"\xef\xbb\xbf")
                    if not content.strip():
                        continue
                    row += 1
                    if source.kind == "text":
                        values = [valid_utf8(content.removesuffix(b"\r"))]
                    else:
                        values = _json_values(content, fields)
                    yield from fields.rows(values, row, offset)
                except BadRowError as error:
                    row += line is None
                    yield BadRow(row, offset, *error.args)
    except (OSError, pa.ArrowException) as error:
        if not is_damage(error):
            assert isinstance(error, OSError)
            raise unreadable(f"{source.path}", error) from error
        yield BadRow(row + 1, offset, DAMAGED, f"{error}; fetch or compress the file again")


@contextmanager
def _opened(source: Source) -> Iterator[tuple[Any, Any]]:
    """Open a file that may be compressed; return the uncompressed stream and the underlying file."""
    with open_stream(source.path) as raw:
        if not source.compression:
            yield raw, raw
            return
        file = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), source.compression)
        try:
            yield file, raw
        finally:
            with suppress(OSError, pa.ArrowException):  # a damaged end is an error of read, and of close again
                file.close()


def _lines_after(file: Any, source: Source, offset: int) -> Iterator[tuple[bytes | None, int]]:
    """Iterate over the lines after an offset, as `split_lines` does; a compressed file is read from its beginning.

    Every start reads a compressed file in the same chunks. Otherwise, the rows before a truncated end would depend on
    the moment of a kill, since the chunk with that end is lost.
    """
    if not source.compression:
        file.seek(offset)
        yield from split_lines(file, offset)
        return
    last = 0
    for line, last in split_lines(file, 0):
        if last > offset:
            yield line, last
    if last < offset:
        raise DataError(f"{source.path} is shorter than when its preparation began; begin again with --restart")


def split_lines(
    file: Any, offset: int, limit: int = MAX_DOCUMENT_BYTES, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[bytes | None, int]]:
    """Split a binary stream into lines, each with the offset after it; None stands for a line above the size limit.

    Args:
        offset: Offset of the stream's position in the file.
    """
    held: list[bytes] = []  # pieces of a line whose end is not read yet
    num_held, is_long = 0, False
    while True:
        chunk = file.read(chunk_bytes)
        if not chunk:
            break
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
        held, num_held = [others[-1]], len(others[-1])
        is_long = num_held > limit
    if num_held:
        yield None if is_long else b"".join(held), offset + num_held


def split_sections(file: Any, limit: int = SECTION_BYTES) -> Iterator[bytes]:
    """Split a binary stream into sections; a section ends at a line end if it contains one."""
    held = b""
    while True:
        chunk = bytes(file.read(CHUNK_BYTES))
        held += chunk
        start = 0
        while len(held) - start > limit:
            end = held.rfind(b"\n", start, start + limit) + 1
            if not end:
                end = start + limit
                while held[end] & 0xC0 == 0x80 and end > start + limit - 4:  # noqa: PLR2004 - inside of a letter
                    end -= 1
            yield held[start:end]
            start = end
        held = held[start:]
        if not chunk:
            break
    if held:
        yield held


def _section_rows(file: Any, row: int) -> Iterator[SourceRow | BadRow]:
    """Iterate over the sections of a text file after a row; the first NUL byte ends the file.

    A section continues unless it is the last, or the next one is blank or bad.
    """
    waiting: SourceRow | None = None
    try:
        for section in _sections(file, row):
            if waiting is not None:
                continues = isinstance(section, SourceRow) and not is_blank(section.text)
                yield waiting._replace(continues=continues)
            waiting = None
            if isinstance(section, SourceRow):
                waiting = section
            else:
                yield section
    except (OSError, pa.ArrowException):
        if waiting is not None:
            yield waiting
        raise
    if waiting is not None:
        yield waiting


def _sections(file: Any, row: int) -> Iterator[SourceRow | BadRow]:
    position = 0
    for number, section in enumerate(split_sections(file), 1):
        begin = position
        position += len(section)
        if number <= row:  # a start cuts all sections again, so that a kill does not move their ends
            continue
        content = section
        if not begin:
            content = section.removeprefix(b"\xef\xbb\xbf")
        if b"\0" in content:
            yield BadRow(number, position, BINARY, f"bytes {begin:,} to {position:,} hold a NUL byte")
            return
        try:
            yield SourceRow(valid_utf8(content, begin), number, position)
        except BadRowError as error:
            yield BadRow(number, position, *error.args)


def _whole(file: Any) -> SourceRow | BadRow:
    pieces, num_bytes = [], 0
    while True:
        chunk = file.read(CHUNK_BYTES)
        if not chunk:
            break
        pieces.append(bytes(chunk))
        num_bytes += len(chunk)
        if num_bytes > MAX_DOCUMENT_BYTES:
            way_out = "give --lines if each line is a document, or split the file"
            return BadRow(1, 0, TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; {way_out}")
    content = b"".join(pieces).removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:
        return BadRow(1, num_bytes, BINARY, "the file holds a NUL byte, so it is not text; remove it from the sources")
    try:
        return SourceRow(valid_utf8(content), 1, num_bytes)
    except BadRowError as error:
        return BadRow(1, num_bytes, *error.args)


def is_blank(text: bytes) -> bool:
    """True for a document that contains only white space, as `str.strip` defines it."""
    rest = text.lstrip()
    # The first character decides nearly every text, and takes at most four bytes.
    return not rest or (rest[:4].decode(errors="ignore")[:1].isspace() and rest.decode(errors="replace").isspace())


def valid_utf8(content: bytes, begin: int = 0) -> bytes:
    """Return the content if it is valid UTF-8, else raise a BadRowError.

    `begin` is the offset of its first byte, for the message.
    """
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {begin + error.start} is 0x{content[error.start]:02x}"
        detail = f"{byte} ({error.reason}); convert it with iconv -t utf-8"
        raise BadRowError(INVALID_UTF8, detail) from None
    return content


def _json_values(line: bytes, fields: Fields) -> list[Any]:
    """Field values of a JSON line: texts in UTF-8, or a conversation."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        valid_utf8(line)  # raises
        raise
    except (RecursionError, ValueError) as error:
        raise BadRowError(BROKEN_JSON, cause_of(error)) from None
    if not isinstance(record, dict):
        wanted = ", ".join(f'"{field}": "..."' for field in fields.names)
        raise BadRowError(WRONG_TYPE, f"{_kind(record)}, not an object such as {{{wanted}}}")
    if fields.answers or fields.chat:
        return [record.get(field) for field in fields.names]
    return [_json_text(record, field, fields.option(field)) for field in fields.names]


def _json_text(record: dict[str, Any], field: str, option: str) -> bytes:
    text = record.get(field)
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            detail = f'"{field}" holds half of a surrogate pair at character {error.start}'
            raise BadRowError(INVALID_UTF8, detail) from None
    if text is None and field in record:
        raise BadRowError(MISSING_FIELD, f'"{field}" is null')
    if text is None:
        fields = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise BadRowError(MISSING_FIELD, f'no "{field}"; fields: {fields}; choose one with {option}')
    raise BadRowError(WRONG_TYPE, f'"{field}" is {_kind(text)}, not a string')


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
