"""Opening of a shard of a prepared corpus: its schema, and the place of each batch.

pyarrow reads the footer and the metadata of the batches, and no document: it reads outside of a damaged file's buffers.
The bodies of the batches are not even fetched: pyarrow advises the system to read them, which is the whole file.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.columns import CHECKSUMS_KEY, check_schema
from nxtrain.data.arrow.rows import DEFECTS
from nxtrain.data.arrow.seal import checked
from nxtrain.data.storage import DataFile, open_stream, read_exactly, shards, unreadable

_METADATA_BYTES = 1 << 14
"""Most bytes of a batch's metadata, which come before its body; two columns take some 300."""

_TAIL = struct.Struct("<i6s")
"""End of an Arrow file: length of the footer, and the magic number."""


class StoredBatch(NamedTuple):
    """Place of a batch's buffers in its file.

    Args:
        file: Number of the file.
        rows: Documents.
        offsets: First byte of the rows + 1 offsets.
        values: First byte of the text or the ids.
        size: Bytes of the text or the ids.
        extra: First byte of the numbers of the second column; 0 if there is none.
    """

    file: int
    rows: int
    offsets: int
    values: int
    size: int
    extra: int = 0

    @property
    def begin(self) -> int:
        """First byte of the buffers."""
        return self.offsets

    @property
    def stop(self) -> int:
        """Offset after the last byte of the buffers."""
        stop = self.values + self.size
        if self.extra:
            stop = max(stop, self.extra + 8 * self.rows)
        return stop


def is_prepared(path: Location) -> bool:
    """True if a path is a prepared file, or a folder or prefix whose first shard is there."""
    try:
        for first in shards(path)[:1]:
            with open_stream(first, _METADATA_BYTES) as file:
                metadata = pa.ipc.open_file(pa.PythonFile(file, mode="r")).schema.metadata or {}
                return any(key.startswith(b"nxtrain.") for key in metadata)  # one key may be damaged
    except (*DEFECTS, DataError):
        pass
    return False


def open_shard(file: DataFile, number: int) -> tuple[Any, list[StoredBatch], DataFile]:
    """Schema of a file, the places of its batches, and the file with verified reads if checksums are there."""
    try:
        with _Bodiless(file) as bodiless:
            file.ahead(bodiless.expect)
            verified = checked(file, bodiless.footer)
            reader = pa.ipc.open_file(pa.PythonFile(bodiless, mode="r"))
            schema = reader.schema
            check_schema(schema, file.name)
            if verified is None and CHECKSUMS_KEY in schema.metadata:
                raise DataError(f"{file.name} is damaged: its checksums are not there; prepare it again")
            batches = []
            for index in range(reader.num_record_batches):
                batches.append(_place(reader.get_batch(index), number, bodiless))
            return schema, batches, verified or file
    except DEFECTS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(f"{file.name}", error) from error
        what = f"{file.name} is no Arrow file, is damaged or is cut short: {error}"
        raise DataError(f"{what}; prepare it again") from error


class _Bodiless(io.RawIOBase):
    """File for pyarrow in which the bodies of batches are zeros, of which no page is touched.

    Attributes:
        footer: Offset of the footer.
        begin: First byte of the last read.
        base: Address of what the last read returned.
        size: Bytes of the last read.
    """

    def __init__(self, file: DataFile) -> None:
        super().__init__()
        self._file, self._position = file, 0
        self._num_bytes = file.num_bytes
        tail = read_exactly(file, _TAIL.size, max(0, self._num_bytes - _TAIL.size))
        footer_bytes = 0
        if len(tail) == _TAIL.size:
            footer_bytes = max(0, _TAIL.unpack(tail)[0])
        self.footer = self._num_bytes - _TAIL.size - footer_bytes
        self.begin = self.base = self.size = 0

    def expect(self) -> None:
        """Begin to fetch the metadata of all batches."""
        footer = bytes(read_exactly(self._file, max(0, self._num_bytes - self.footer), max(0, self.footer)))
        for offset, _ in ipc.blocks_of(footer):
            self._file.ahead(read_exactly, self._file, _METADATA_BYTES, offset)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}
        position = begins[whence] + offset
        if position < 0:
            raise pa.ArrowInvalid(f"a batch begins at byte {position:,}")
        self._position = position
        return position

    def read(self, size: int = -1) -> Any:
        """Next bytes: those of the footer, and otherwise the first ones, which are of metadata, and then zeros."""
        left = max(0, self._num_bytes - self._position)
        if size < 0:
            size = left
        wanted = size = min(size, left)
        if self._position < self.footer:
            wanted = min(size, _METADATA_BYTES)
        content = read_exactly(self._file, wanted, self._position)
        found = np.zeros(size, np.uint8)
        found[: len(content)] = np.frombuffer(content, np.uint8)
        self.begin = self._position
        self.base, self.size = found.ctypes.data, found.size
        self._position += found.size
        return found


def _place(batch: pa.RecordBatch, file: int, source: _Bodiless) -> StoredBatch:
    """Place of a batch in the file, from which its body was read last; nothing of its buffers is read."""
    column = batch.column(0)
    buffers = column.buffers()
    offsets, values = buffers[1], buffers[-1]
    rows = len(column)
    if not rows:
        return StoredBatch(file, 0, 0, 0, 0)
    needed = [(offsets, 8 * (rows + 1)), (values, 0)]
    if batch.num_columns > 1:
        needed.append((batch.column(1).buffers()[1], 8 * rows))
    for buffer, least in needed:
        inside = buffer is not None and 0 <= buffer.address - source.base <= source.size - buffer.size
        if not inside or buffer.size < least:
            raise pa.ArrowInvalid(f"a batch of {rows:,} documents has a buffer that is too short or not in the file")
    if rows != batch.num_rows or column.offset:
        raise pa.ArrowInvalid(f"a batch of {batch.num_rows:,} documents has {rows:,} in its column")
    shift = source.begin - source.base
    extra = needed[-1][0].address + shift if batch.num_columns > 1 else 0
    return StoredBatch(file, rows, offsets.address + shift, values.address + shift, values.size, extra)
