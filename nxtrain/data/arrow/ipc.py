"""Writer of Arrow IPC files batch by batch, so that a killed writer can continue after the last complete batch.

pyarrow can only write a file in one go, since the footer has the location of every batch. Messages are therefore
appended one by one. The footer is pyarrow's footer of a file without batches, with the list of batches replaced.

Reference: Arrow columnar format, "IPC File Format"; format/File.fbs for the footer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

MAGIC = b"ARROW1"

_BEGIN = MAGIC + b"\0\0"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Marker bytes after the last batch."""

_BATCHES_FIELD = 3
"""Index of the footer's field `recordBatches`."""

_BLOCK = struct.Struct("<qi4xq")
"""Binary format of a batch's location in the footer: offset, bytes of the metadata, bytes of the body."""


class Block(NamedTuple):
    """Location of a record batch in an Arrow file.

    Args:
        offset: First byte of the message.
        metadata: Number of bytes of the message before its body.
    """

    offset: int
    metadata: int
    body: int


def begin(schema: pa.Schema) -> bytes:
    """First bytes of an Arrow file: magic number and schema."""
    return _BEGIN + bytes(schema.serialize())


def message(batch: pa.RecordBatch, offset: int) -> tuple[pa.Buffer, Block]:
    """Bytes of a record batch, and its location if written at a given offset."""
    content = batch.serialize()
    _, size = struct.unpack_from("<ii", content)
    metadata = 8 + size
    return content, Block(offset, metadata, content.size - metadata)


def end(schema: pa.Schema, blocks: Sequence[Block]) -> bytes:
    """Last bytes of an Arrow file: footer, length of the footer, and magic number."""
    footer = _footer(schema, blocks)
    return footer + struct.pack("<i", len(footer)) + MAGIC


def blocks_of(footer: bytes) -> Iterator[Block]:
    """Locations of the record batches in a footer; empty if the footer is damaged."""
    try:
        begin = _batches_at(footer)
        begin += struct.unpack_from("<I", footer, begin)[0]
        (number,) = struct.unpack_from("<I", footer, begin)
    except struct.error:
        return
    listed = footer[begin + 4 : begin + 4 + _BLOCK.size * number]
    for block in _BLOCK.iter_unpack(listed[: len(listed) // _BLOCK.size * _BLOCK.size]):
        yield Block(*block)


def _batches_at(footer: bytes | bytearray) -> int:
    """Offset in the footer of the reference to the list of batches."""
    (root,) = struct.unpack_from("<I", footer)
    (to_vtable,) = struct.unpack_from("<i", footer, root)
    (field,) = struct.unpack_from("<H", footer, root - to_vtable + 4 + 2 * _BATCHES_FIELD)
    return int(root + field)


def _footer(schema: pa.Schema, blocks: Sequence[Block]) -> bytes:
    """Footer flatbuffer of an empty Arrow file, with its reference set to a list of batches at the end."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    empty = sink.getvalue().to_pybytes()
    (size,) = struct.unpack_from("<i", empty, len(empty) - len(MAGIC) - 4)
    last = len(empty) - len(MAGIC) - 4
    footer = bytearray(empty[last - size : last])
    at = _batches_at(footer)
    footer += bytes(-(len(footer) + 4) % 8)  # blocks hold 8-byte integers, and follow a count of 4 bytes
    struct.pack_into("<I", footer, at, len(footer) - at)
    footer += struct.pack("<I", len(blocks))
    for block in blocks:
        footer += _BLOCK.pack(*block)
    return bytes(footer)
