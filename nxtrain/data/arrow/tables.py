"""Rows of Parquet and Arrow files, read in slices of bounded size, and safe for damaged files.

An Arrow file has offsets of its documents, which pyarrow trusts. In a damaged file, pyarrow's casts, null counts and
scalars read outside of the buffers, and crash the process. This module does not call these functions. It compares every
offset from the file with the size of its buffer.

Reference: Arrow columnar format, "Variable-size Binary Layout", "Variable-size Binary View Layout".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray

from nxtrain.common.errors import cause_of
from nxtrain.common.io.regular import require_regular
from nxtrain.data.arrow.rows import (
    BROKEN_JSON,
    DAMAGED,
    DEFECTS,
    INVALID_UTF8,
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    TOO_LONG,
    TOOLS,
    WRONG_TYPE,
    BadRow,
    BadRowError,
    Fields,
    ReadProgress,
    SourceRow,
    is_damage,
    valid_utf8,
)
from nxtrain.data.arrow.sources import Source
from nxtrain.data.storage import open_stream, unreadable

_SLICE_ROWS = 256
"""Number of rows that are converted in one call; documents are copied one by one."""

_PARQUET_BYTES = 1 << 16
"""Minimum bytes of a request for a part of a Parquet file. Columns are requested in 1 MiB anyway."""

_VIEW_BYTES = 16
_INLINE_BYTES = 12
"""Maximum bytes of a text that is stored inside of an Arrow string view."""

_READ_AGAIN = "fetch or write the file again"


def table_rows(source: Source, fields: Fields, start: int, progress: ReadProgress) -> Iterator[SourceRow | BadRow]:
    """Iterate over the rows of a Parquet or Arrow file after a given row.

    Args:
        start: Number of the last row to skip.
    """
    row = start
    try:
        if isinstance(source.path, Path):
            require_regular(source.path)
        read = _parquet if source.kind == "parquet" else _arrow
        for document in read(source, fields, start, progress):
            row = document.row
            yield document
    except DEFECTS as error:
        if not is_damage(error):
            assert isinstance(error, OSError)
            raise unreadable(f"{source.path}", error) from error
        yield BadRow(row + 1, 0, DAMAGED, f"{error}; {_READ_AGAIN}")
    progress(source.size)


def _parquet(source: Source, fields: Fields, start: int, progress: ReadProgress) -> Iterator[SourceRow | BadRow]:
    """Iterate over the rows of a Parquet file. A damaged row group does not hide the next row group."""
    opened = source.path if isinstance(source.path, Path) else open_stream(source.path, _PARQUET_BYTES)
    with pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20) as file:
        total = file.metadata.num_rows
        fields = _present(file.schema_arrow, fields)
        defect = _field_defect(file.schema_arrow, fields)
        if defect:
            if start < total:
                yield BadRow(total, 0, *defect, num_rows=total - start)
            return
        begin = 0
        for group in range(file.metadata.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            row = begin
            try:
                if start < end:
                    for batch in file.iter_batches(_SLICE_ROWS, row_groups=[group], columns=[*fields.names]):
                        yield from _documents([batch.column(field) for field in fields.names], row, start, fields)
                        row += batch.num_rows
                        progress(source.size * row // max(total, 1))
            except DEFECTS as error:
                if not is_damage(error):
                    raise
                first = max(row, start)
                detail = f"row group {group}: {error}; {_READ_AGAIN}"
                yield BadRow(end, 0, DAMAGED, detail, num_rows=end - first)
            begin = end


def _arrow(source: Source, fields: Fields, start: int, progress: ReadProgress) -> Iterator[SourceRow | BadRow]:
    """Iterate over the rows of an Arrow IPC file or stream.

    A file on a disk is memory-mapped, so that a batch may be larger than the memory. Batches of terabytes exist.
    """
    path = source.path
    with pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(open_stream(path), mode="r") as mapped:
        is_file = source.kind == "arrow" and mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = _opened(mapped, is_file)
        fields = _present(reader.schema, fields)
        defect, begin = _field_defect(reader.schema, fields), 0
        if not defect:
            numbers = [reader.schema.get_field_index(field) for field in fields.names]
            mapped.seek(0)
            reader = _opened(mapped, is_file, pa.ipc.IpcReadOptions(included_fields=numbers))
        batches = reader
        if is_file:
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            end = begin + batch.num_rows
            if start < end and defect:
                yield BadRow(end, 0, *defect, num_rows=end - max(begin, start))
            elif start < end:
                columns = [batch.column(field) for field in fields.names]
                for column in columns:
                    if len(column) != batch.num_rows:
                        raise pa.ArrowInvalid(f"a batch of {batch.num_rows} rows has {len(column)} in its column")
                for row in range(max(begin, start), end, _SLICE_ROWS):
                    parts = [column.slice(row - begin, min(_SLICE_ROWS, end - row)) for column in columns]
                    yield from _documents(parts, row, start, fields)
            begin = end
            progress(min(source.size, mapped.tell()))


def _opened(mapped: Any, is_file: bool, options: Any = None) -> Any:
    return pa.ipc.open_file(mapped, options=options) if is_file else pa.ipc.open_stream(mapped, options=options)


def _present(schema: pa.Schema, fields: Fields) -> Fields:
    """Fields without the prompt of answers and without tools, if the file has no such columns."""
    if fields.answers is not None and fields.prompt not in schema.names:
        fields = replace(fields, prompt="")
    if fields.tools not in schema.names:
        fields = replace(fields, tools="")
    return fields


def _field_defect(schema: pa.Schema, fields: Fields) -> tuple[str, str] | None:
    """Reason and detail of a defect that affects every row: a missing column, or a column of an unsuitable type."""
    defects = [_column_defect(schema, field, fields) for field in fields.names]
    return next(filter(None, defects), None)


def _column_defect(schema: pa.Schema, field: str, fields: Fields) -> tuple[str, str] | None:
    if schema.get_field_index(field) < 0:
        names = ", ".join(schema.names[:8]) or "none"
        return MISSING_FIELD, f'no column "{field}"; columns: {names}; choose one with {fields.option(field)}'
    kind = schema.field(field).type
    if field == fields.tools:
        return None
    if fields.answers is not None and (_holds_turns(kind) or pa.types.is_boolean(kind)):
        return None
    if fields.chat is not None:
        if not _holds_turns(kind):
            return WRONG_TYPE, f'column "{field}" holds {kind}, not lists of turns with role and content'
        return None
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    is_bytes = types.is_binary(value) or types.is_large_binary(value) or types.is_binary_view(value)
    if not (is_text or is_bytes):
        return WRONG_TYPE, f'column "{field}" holds {kind}, not strings'
    return None


def _holds_turns(kind: pa.DataType) -> bool:
    """True for a column of lists of structures or of JSON values, which may be turns of conversations."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and (pa.types.is_struct(kind.value_type) or _is_json(kind.value_type)))


def _is_json(kind: pa.DataType) -> bool:
    """True for Arrow's type of JSON text, which Hugging Face's datasets give values of several forms."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _documents(columns: Sequence[Any], begin: int, start: int, fields: Fields) -> Iterator[SourceRow | BadRow]:
    """Iterate over the rows of columns whose first value belongs to row `begin` + 1; rows up to `start` are skipped."""
    if fields.answers is not None:
        yield from _written(
            [_values(*named) for named in zip(columns, fields.names, strict=True)], begin, start, fields
        )
        return
    if fields.chat is not None:
        yield from _written([*map(_objects, columns)], begin, start, fields)
        return
    texts = zip(*(document_bytes(column, MAX_DOCUMENT_BYTES) for column in columns), strict=True)
    for row, values in enumerate(texts, begin + 1):
        if row <= start:
            continue
        defect = next(filter(None, map(_defect, values, fields.names)), None)
        if defect:
            yield BadRow(row, 0, *defect)
        else:
            yield from fields.rows(values, row, 0)


def _written(columns: Sequence[Iterator[Any]], begin: int, start: int, fields: Fields) -> Iterator[SourceRow | BadRow]:
    """Iterate over rows whose documents are converted from column values, as in `_documents`; errors are bad rows."""
    for row, values in enumerate(zip(*columns, strict=True), begin + 1):
        if row <= start:
            continue
        try:
            for value in values:
                if isinstance(value, BadRowError):
                    raise value
            yield from fields.rows(values, row, 0)
        except BadRowError as error:
            yield BadRow(row, 0, *error.args)


def _objects(column: Any) -> Iterator[Any]:
    """Conversations or tools in a slice of a column, or None; an error for a value that is not JSON."""
    column.validate(full=True)  # pyarrow trusts a file's offsets when it makes Python objects
    for item in column:
        value = item.as_py()
        try:
            yield _plain(value, column.type)
        except (RecursionError, ValueError) as error:
            yield BadRowError(BROKEN_JSON, cause_of(error))


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Value of a column as its author wrote it: JSON decoded, and structures without null entries.

    A structure has null for the keys that only other structures of the column have.
    """
    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, kind.field(key).type) for key, item in value.items() if item is not None}
    return value


def _values(column: Any, field: str) -> Iterator[Any]:
    """Strings or conversations in a slice of a column, None for null, and an error for other values."""
    if field == TOOLS or _holds_turns(column.type):
        yield from _objects(column)
        return
    if pa.types.is_boolean(column.type):
        yield from column.to_pylist()
        return
    for text in document_bytes(column, MAX_DOCUMENT_BYTES):
        defect = None
        if text is not None:
            defect = _defect(text, field)
        if defect:
            yield BadRowError(*defect)
        else:
            yield text.decode() if isinstance(text, bytes) else None


def _defect(text: bytes | int | None, field: str) -> tuple[str, str] | None:
    """Reason and detail of a defect of a document; None for usable text."""
    if text is None:
        return MISSING_FIELD, f'"{field}" is null'
    if isinstance(text, int):
        return TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document"
    try:
        valid_utf8(text)
    except BadRowError as error:
        return INVALID_UTF8, str(error.args[1])
    return None


def document_bytes(column: pa.Array, limit: int) -> Iterator[bytes | int | None]:
    """Copy the documents of a column: None for null, and only the length for a document above the size limit.

    Args:
        column: Column of strings or bytes, dictionary-encoded or not, with offsets of any width, or with views.
    """
    kind, buffers = column.type, column.buffers()
    start, number = column.offset, len(column)
    if not number:
        return
    valid = _valid(buffers[0], start, number)
    if pa.types.is_dictionary(kind):
        yield from _of_dictionary(column, valid, limit)
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        yield from _of_views(buffers, start, valid, limit)
    else:
        is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        dtype = np.int64 if is_large else np.int32
        offsets = _numbers(buffers[1], dtype, start, number + 1).tolist()
        content = memoryview(buffers[2] or b"")
        if any(begin > end for begin, end in pairwise([0, *offsets])):
            raise pa.ArrowInvalid("the offsets of the documents descend")
        if offsets[-1] > len(content):
            raise pa.ArrowInvalid(f"a document ends at byte {offsets[-1]:,} of {len(content):,}")
        for (begin, end), is_valid in zip(pairwise(offsets), valid, strict=True):
            if not is_valid:
                yield None
            elif end - begin <= limit:
                yield bytes(content[begin:end])
            else:
                yield end - begin


def _of_dictionary(column: pa.Array, valid: Sequence[bool], limit: int) -> Iterator[bytes | int | None]:
    indices = _numbers(column.buffers()[1], np.dtype(str(column.type.index_type)), column.offset, len(column))
    entries = column.dictionary
    for index, is_valid in zip(indices.tolist(), valid, strict=True):
        if not is_valid:
            yield None
        elif 0 <= index < len(entries):
            yield from document_bytes(entries.slice(index, 1), limit)
        else:
            raise pa.ArrowInvalid(f"entry {index} of a dictionary of {len(entries)} entries")


def _of_views(buffers: Sequence[Any], start: int, valid: Sequence[bool], limit: int) -> Iterator[bytes | int | None]:
    views = _numbers(buffers[1], np.uint8, _VIEW_BYTES * start, _VIEW_BYTES * len(valid))
    contents = [memoryview(buffer or b"") for buffer in buffers[2:]]
    words = views.view(np.int32).reshape(-1, 4).tolist()  # length, prefix, buffer, offset
    for row, ((length, _, buffer, offset), is_valid) in enumerate(zip(words, valid, strict=True)):
        if not is_valid:
            yield None
        elif 0 <= length <= _INLINE_BYTES:
            begin = _VIEW_BYTES * row + 4
            yield views[begin : begin + length].tobytes()
        elif length < 0 or not 0 <= buffer < len(contents) or not 0 <= offset <= len(contents[buffer]) - length:
            raise pa.ArrowInvalid(f"a view of {length} bytes at byte {offset} of buffer {buffer} is outside of it")
        elif length <= limit:
            yield bytes(contents[buffer][offset : offset + length])
        else:
            yield length


def _numbers(buffer: Any, dtype: DTypeLike, start: int, number: int) -> NDArray[Any]:
    """View of a range of numbers in a buffer, after checking that the buffer has the range."""
    dtype = np.dtype(dtype)
    size = buffer.size if buffer is not None else 0
    if (start + number) * dtype.itemsize > size:
        raise pa.ArrowInvalid(f"a buffer has {size:,} bytes, and {number:,} rows need more")
    return np.frombuffer(buffer, dtype, number, start * dtype.itemsize)


def _valid(buffer: Any, start: int, number: int) -> Sequence[bool]:
    """Validity of each row from a bitmap buffer; all rows are valid without a buffer."""
    if buffer is None:
        return [True] * number
    first, last = start // 8, -(-(start + number) // 8)
    bits = np.unpackbits(_numbers(buffer, np.uint8, first, last - first), bitorder="little")
    valid: Sequence[bool] = bits[start - 8 * first :][:number].astype(bool).tolist()
    return valid
