"""Rows of Parquet and Arrow files, read in slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import require_regular
from nxtrain.data.arrow.rows import (
    DAMAGED,
    DEFECTS,
    INVALID_UTF8,
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    TOO_LONG,
    WRONG_TYPE,
    BadRow,
    BadRowError,
    Fields,
    FileProgress,
    SourceRow,
    bad_utf8,
    is_damage,
)
from nxtrain.data.arrow.sources import Source
from nxtrain.data.arrow.values import document_bytes, is_binary, is_string
from nxtrain.data.storage import open_stream, unreadable

_SLICE_ROWS = 256
"""Rows that are converted at once; documents are copied one by one."""

_PARQUET_BYTES = 1 << 16
"""Least bytes of a request for a part of a Parquet file. Its columns come in requests of 1 MiB anyway."""

_READ_AGAIN = "fetch or write the file again"


def table_rows(source: Source, fields: Fields, start: int, progress: FileProgress) -> Iterator[SourceRow | BadRow]:
    """Rows of a Parquet or Arrow file after a row.

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
    progress.num_bytes = source.size


def _parquet(source: Source, fields: Fields, start: int, progress: FileProgress) -> Iterator[SourceRow | BadRow]:
    """Rows of a Parquet file; a damaged row group does not hide the next one."""
    opened = source.path if isinstance(source.path, Path) else open_stream(source.path, _PARQUET_BYTES)
    with pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20) as file:
        total = file.metadata.num_rows
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
                        progress.num_bytes = source.size * row // max(total, 1)
            except DEFECTS as error:
                if not is_damage(error):
                    raise
                first = max(row, start)
                detail = f"row group {group}: {error}; {_READ_AGAIN}"
                yield BadRow(end, 0, DAMAGED, detail, num_rows=end - first)
            begin = end


def _arrow(source: Source, fields: Fields, start: int, progress: FileProgress) -> Iterator[SourceRow | BadRow]:
    """Rows of an Arrow IPC file or stream.

    A file of a disk is mapped, so that a batch may be larger than the memory: single batches of terabytes are in use.
    """
    with _mapped(source.path) as mapped:
        is_file = source.kind == "arrow" and mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = _opened(mapped, is_file)
        defect, begin = _field_defect(reader.schema, fields), 0
        if not defect:
            numbers = [reader.schema.get_field_index(field) for field in fields.names]
            mapped.seek(0)
            reader = _opened(mapped, is_file, pa.ipc.IpcReadOptions(included_fields=numbers))
        for batch in _batches(reader, is_file):
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
            progress.num_bytes = min(source.size, mapped.tell())


def _mapped(path: Location) -> Any:
    return pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(open_stream(path), mode="r")


def _opened(mapped: Any, is_file: bool, options: Any = None) -> Any:
    return pa.ipc.open_file(mapped, options=options) if is_file else pa.ipc.open_stream(mapped, options=options)


def _batches(reader: Any, is_file: bool) -> Iterator[Any]:
    if not is_file:
        yield from reader
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _field_defect(schema: pa.Schema, fields: Fields) -> tuple[str, str] | None:
    """Reason and detail that make every row bad: a column is absent, or has an unsuitable type."""
    is_chat = fields.chat is not None
    for field in fields.names:
        defect = _column_defect(schema, field, is_chat)
        if defect:
            return defect
    return None


def _column_defect(schema: pa.Schema, field: str, is_chat: bool) -> tuple[str, str] | None:
    if schema.get_field_index(field) < 0:
        names = ", ".join(schema.names[:8]) or "none"
        return MISSING_FIELD, f'no column "{field}"; columns: {names}; choose one with --field'
    kind = schema.field(field).type
    if is_chat:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not is_list or not pa.types.is_struct(kind.value_type):
            return WRONG_TYPE, f'column "{field}" holds {kind}, not lists of turns with role and content'
        return None
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (is_string(value) or is_binary(value)):
        return WRONG_TYPE, f'column "{field}" holds {kind}, not strings'
    return None


def _documents(columns: Sequence[Any], begin: int, start: int, fields: Fields) -> Iterator[SourceRow | BadRow]:
    """Rows of a part of the columns that begins after row `begin`; rows up to `start` are left out."""
    if fields.chat is not None:
        yield from _conversations(columns[0], begin, start, fields)
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


def _conversations(column: Any, begin: int, start: int, fields: Fields) -> Iterator[SourceRow | BadRow]:
    """Rows of a part of a column of conversations, as in `_documents`."""
    column.validate(full=True)  # pyarrow trusts a file's offsets when it makes Python objects
    for row, messages in enumerate(column, begin + 1):
        if row <= start:
            continue
        turns = messages.as_py()
        if turns is not None:  # a turn has null for the keys that only other turns of the column have
            turns = [turn and {key: value for key, value in turn.items() if value is not None} for turn in turns]
        try:
            yield from fields.rows([turns], row, 0)
        except BadRowError as error:
            yield BadRow(row, 0, *error.args)


def _defect(text: bytes | int | None, field: str) -> tuple[str, str] | None:
    """Reason and detail that make a row bad; None for text."""
    if text is None:
        return MISSING_FIELD, f'"{field}" is null'
    if isinstance(text, int):
        return TOO_LONG, f"more than {MAX_DOCUMENT_BYTES:,} bytes; split the document"
    detail = bad_utf8(text)
    if detail:
        return INVALID_UTF8, detail
    return None
