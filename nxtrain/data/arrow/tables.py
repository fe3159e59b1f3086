"""Rows of Parquet and Arrow files, read in slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nxtrain.data.arrow.rows import (
    DAMAGED,
    INVALID_UTF8,
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    TOO_LONG,
    WRONG_TYPE,
    BadRow,
    Progress,
    Row,
    bad_utf8,
    is_damage,
)
from nxtrain.data.arrow.sources import Source
from nxtrain.data.files import unreadable
from nxtrain.io.regular import require_regular

_SLICE_ROWS = 256
"""Rows that are converted at once; documents are copied one by one."""

_READ_AGAIN = "fetch or write the file again"


def table_rows(source: Source, field: str, start: int, progress: Progress) -> Iterator[Row | BadRow]:
    """Rows of a Parquet or Arrow file behind a row.

    Args:
        source: The file.
        field: Column that holds the documents.
        start: Number of the last row that is not wanted again.
        progress: Gets the position of the reader.

    Raises:
        DataError, StorageError: The file cannot be read.
    """
    row = start
    try:
        require_regular(source.path)
        read = _parquet if source.kind == "parquet" else _arrow
        for found in read(source, field, start, progress):
            row = found.row
            yield found
    except (OSError, pa.ArrowException) as error:
        if not is_damage(error):
            assert isinstance(error, OSError)
            raise unreadable(f"{source.path}", error) from error
        yield BadRow(row + 1, 0, DAMAGED, f"{error}; {_READ_AGAIN}")
    progress.num_bytes = source.size


def _parquet(source: Source, field: str, start: int, progress: Progress) -> Iterator[Row | BadRow]:
    """Rows of a Parquet file; a damaged row group does not hide the next one."""
    with pq.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 20) as file:
        total = file.metadata.num_rows
        if defect := _field_defect(file.schema_arrow, field):
            if start < total:
                yield BadRow(total, 0, *defect, num_rows=total - start)
            return
        begin = 0
        for group in range(file.metadata.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            row = begin
            try:
                if start < end:
                    for batch in file.iter_batches(_SLICE_ROWS, row_groups=[group], columns=[field]):
                        yield from _documents(batch.column(0), row, start, field)
                        row += batch.num_rows
                        progress.num_bytes = source.size * row // max(total, 1)
            except (OSError, pa.ArrowException) as error:
                if not is_damage(error):
                    raise
                first = max(row, start)
                detail = f"row group {group}: {error}; {_READ_AGAIN}"
                yield BadRow(end, 0, DAMAGED, detail, num_rows=end - first)
            begin = end


def _arrow(source: Source, field: str, start: int, progress: Progress) -> Iterator[Row | BadRow]:
    """Rows of an Arrow IPC file or stream.

    The file is mapped, so that a batch may be larger than the memory: single batches of terabytes are in use.
    """
    with pa.memory_map(str(source.path)) as mapped:
        is_file = source.kind == "arrow" and mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        defect = _field_defect(reader.schema, field)
        begin = 0
        for batch in _batches(reader, is_file):
            end = begin + batch.num_rows
            if start < end and defect:
                yield BadRow(end, 0, *defect, num_rows=end - max(begin, start))
            elif start < end:
                column = batch.column(reader.schema.get_field_index(field))
                first = max(begin, start)
                for row in range(first, end, _SLICE_ROWS):
                    part = column.slice(row - begin, min(_SLICE_ROWS, end - row))
                    yield from _documents(part, row, start, field)
            begin = end
            progress.num_bytes = min(source.size, mapped.tell())


def _batches(reader: Any, is_file: bool) -> Iterator[Any]:
    if not is_file:
        yield from reader
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _field_defect(schema: pa.Schema, field: str) -> tuple[str, str] | None:
    """Reason and detail that make every row bad: the column is absent or holds no text."""
    if schema.get_field_index(field) < 0:
        names = ", ".join(schema.names[:8]) or "none"
        return MISSING_FIELD, f'no column "{field}"; columns: {names}; choose one with --field'
    kind = schema.field(field).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_string(value) or _is_bytes(value)):
        return WRONG_TYPE, f'column "{field}" holds {kind}, not strings'
    return None


def _is_string(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _documents(column: Any, begin: int, start: int, field: str) -> Iterator[Row | BadRow]:
    """Rows of a part of a column that begins behind row `begin`; those up to `start` are left out."""
    is_valid = not _is_bytes(column.type)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        is_valid = False
        column.validate()  # raises if the offsets are damaged, too
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
        is_valid = is_valid and not _is_bytes(column.type)
    view = column.cast(pa.large_binary(), safe=False)
    offsets = np.frombuffer(view.buffers()[1], np.int64)[view.offset : view.offset + len(view) + 1].tolist()
    content = memoryview(view.buffers()[2] or b"")
    if any(last < first for first, last in pairwise(offsets)) or offsets[-1] > len(content):
        raise pa.ArrowInvalid("offsets of the column are not ascending")
    nulls = view.is_null().to_pylist() if view.null_count else None
    for place in range(max(0, start - begin), len(view)):
        row = begin + place + 1
        first, last = offsets[place], offsets[place + 1]
        if nulls and nulls[place]:
            yield BadRow(row, 0, MISSING_FIELD, f'"{field}" is null')
        elif last - first > MAX_DOCUMENT_BYTES:
            yield BadRow(row, 0, TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document")
        else:
            text = bytes(content[first:last])
            if not is_valid and (defect := bad_utf8(text)):
                yield BadRow(row, 0, INVALID_UTF8, defect)
            else:
                yield Row(text, row, 0)
