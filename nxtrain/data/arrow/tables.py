"""Rows of Parquet and Arrow files, read in slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nxtrain.data.arrow.rows import (
    DAMAGED,
    DEFECTS,
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
from nxtrain.data.arrow.values import document_bytes, is_binary, is_string
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
    except DEFECTS as error:
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
            except DEFECTS as error:
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
        reader = _opened(mapped, is_file)
        defect, begin = _field_defect(reader.schema, field), 0
        if not defect:
            number = reader.schema.get_field_index(field)
            mapped.seek(0)
            reader = _opened(mapped, is_file, pa.ipc.IpcReadOptions(included_fields=[number]))
        for batch in _batches(reader, is_file):
            end = begin + batch.num_rows
            if start < end and defect:
                yield BadRow(end, 0, *defect, num_rows=end - max(begin, start))
            elif start < end:
                column = batch.column(0)
                if len(column) != batch.num_rows:
                    raise pa.ArrowInvalid(f"a batch of {batch.num_rows} rows has {len(column)} in its column")
                for row in range(max(begin, start), end, _SLICE_ROWS):
                    part = column.slice(row - begin, min(_SLICE_ROWS, end - row))
                    yield from _documents(part, row, start, field)
            begin = end
            progress.num_bytes = min(source.size, mapped.tell())


def _opened(mapped: Any, is_file: bool, options: Any = None) -> Any:
    return pa.ipc.open_file(mapped, options=options) if is_file else pa.ipc.open_stream(mapped, options=options)


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
    if not (is_string(value) or is_binary(value)):
        return WRONG_TYPE, f'column "{field}" holds {kind}, not strings'
    return None


def _documents(column: Any, begin: int, start: int, field: str) -> Iterator[Row | BadRow]:
    """Rows of a part of a column that begins behind row `begin`; those up to `start` are left out."""
    for place, text in enumerate(document_bytes(column, MAX_DOCUMENT_BYTES)):
        row = begin + place + 1
        if row <= start:
            continue
        if text is None:
            yield BadRow(row, 0, MISSING_FIELD, f'"{field}" is null')
        elif isinstance(text, int):
            yield BadRow(row, 0, TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document")
        elif defect := bad_utf8(text):
            yield BadRow(row, 0, INVALID_UTF8, defect)
        else:
            yield Row(text, row, 0)
