"""Opening of a shard of a prepared corpus: its schema, and the location of each record batch.

pyarrow parses only the footer and the metadata of the batches, and no document. On a damaged file it would read outside
of the buffers.
"""

from __future__ import annotations

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

_HEAD_BYTES = 1 << 14
"""Minimum bytes of a request for an object's footer and schema."""

_TAIL = struct.Struct("<i6s")
"""Binary format of the end of an Arrow file: length of the footer, and magic number."""


class StoredBatch(NamedTuple):
    """Location of a record batch's buffers in its file.

    Args:
        file: Index of the file.
        rows: Number of documents.
        offsets: Position of the rows + 1 document offsets in the file.
        values: Position of the text or the ids in the file.
        size: Number of bytes of the text or the ids.
        extra: Position of the numbers of each further column in the file.
    """

    file: int
    rows: int
    offsets: int
    values: int
    size: int
    extra: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """End position of the buffers in the file."""
        return max([self.values + self.size, *(first + 8 * self.rows for first in self.extra)])


def is_prepared(path: Location) -> bool:
    """True if a path is a prepared corpus: a file, or a folder or prefix that has a first shard."""
    try:
        for first in shards(path)[:1]:
            with open_stream(first, _HEAD_BYTES) as file:
                metadata = pa.ipc.open_file(pa.PythonFile(file, mode="r")).schema.metadata or {}
                return any(key.startswith(b"nxtrain.") for key in metadata)  # one key may be damaged
    except (*DEFECTS, DataError):
        pass
    return False


def open_shard(file: DataFile, number: int) -> tuple[Any, list[StoredBatch], DataFile]:
    """Open a shard: return its schema, the locations of its batches, and the file, verified if it has checksums."""
    try:
        tail = bytes(read_exactly(file, _TAIL.size, max(0, file.num_bytes - _TAIL.size)))
        if len(tail) < _TAIL.size or not tail.endswith(ipc.MAGIC):
            raise pa.ArrowInvalid("it does not end as an Arrow file")
        footer_start = file.num_bytes - _TAIL.size - _TAIL.unpack(tail)[0]
        if not 0 < footer_start < file.num_bytes - _TAIL.size:
            raise pa.ArrowInvalid(f"its footer would begin at byte {footer_start:,}")
        footer = bytes(read_exactly(file, file.num_bytes - footer_start, footer_start))
        blocks = list(ipc.blocks_of(footer))
        for block in blocks:
            if min(block) < 0 or sum(block) > footer_start:
                raise pa.ArrowInvalid(f"a batch lies from byte {block.offset:,} to {sum(block):,}")
            file.ahead(read_exactly, file, block.metadata, block.offset)
        verified = checked(file, footer_start)
        # pyarrow reads the schema from the footer, and nothing else of a file without batches.
        schema = pa.ipc.open_file(pa.BufferReader(ipc.MAGIC + b"\0\0" + footer)).schema
        check_schema(schema, file.name)
        if verified is None and CHECKSUMS_KEY in schema.metadata:
            raise DataError(f"{file.name} is damaged: its checksums are missing; prepare it again")
        batches = [_located(file, block, schema, number) for block in blocks]
    except DEFECTS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(f"{file.name}", error) from error
        what = f"{file.name} is not an Arrow file, is damaged or is cut short: {error}"
        raise DataError(f"{what}; prepare it again") from error
    return schema, batches, verified or file


def _located(file: DataFile, block: ipc.Block, schema: Any, number: int) -> StoredBatch:
    """Find the buffers of a record batch from its metadata, without reading its body.

    Raises:
        ArrowInvalid: A buffer is too short, or lies outside of the batch, as those of a compressed batch do.
    """
    content = np.zeros(block.metadata + block.body, np.uint8)
    metadata = read_exactly(file, block.metadata, block.offset)
    content[: len(metadata)] = np.frombuffer(metadata, np.uint8)
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(content)), schema)
    column = batch.column(0)
    buffers = column.buffers()
    offsets, values = buffers[1], buffers[-1]
    rows = len(column)
    if not rows:
        return StoredBatch(number, 0, 0, 0, 0)
    needed = [(offsets, 8 * (rows + 1)), (values, 0)]
    numbers = [further.buffers()[1] for further in batch.columns[1:]]
    needed += [(buffer, 8 * rows) for buffer in numbers]
    base = content.ctypes.data
    for buffer, least in needed:
        inside = buffer is not None and 0 <= buffer.address - base <= content.size - buffer.size
        if not inside or buffer.size < least:
            raise pa.ArrowInvalid(f"a batch of {rows:,} documents has a buffer that is too short or not in the file")
    if rows != batch.num_rows or column.offset:
        raise pa.ArrowInvalid(f"a batch of {batch.num_rows:,} documents has {rows:,} in its column")
    shift = block.offset - base
    extra = tuple(buffer.address + shift for buffer in numbers)
    return StoredBatch(number, rows, offsets.address + shift, values.address + shift, values.size, extra)
