"""Arrow IPC files that grow batch by batch, so that a killed writer goes on after the last whole batch.

pyarrow writes a file from its begin to its end only: the footer holds the location of every batch. Messages are
therefore appended one by one, and the footer is pyarrow's own for a file without a batch, with the list of batches
replaced.

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
"""Bytes after the last batch."""

_BATCHES_FIELD = 3
"""Number of the footer's field `recordBatches`."""

_BLOCK = struct.Struct("<qi4xq")
"""Location of a batch in the format of the footer: offset, bytes of the metadata, bytes of the body."""


class Block(NamedTuple):
    """Location of a batch in a file.

    Args:
        offset: First byte of the message.
        metadata: Bytes of the message before its body.
    """

    offset: int
    metadata: int
    body: int


def begin(schema: pa.Schema) -> bytes:
    """First bytes of a file: magic number and schema."""
    return _BEGIN + bytes(schema.serialize())


def message(batch: pa.RecordBatch, offset: int) -> tuple[pa.Buffer, Block]:
    """Bytes of a batch, and its location if the bytes are written at an offset."""
    content = batch.serialize()
    _, size = struct.unpack_from("<ii", content)
    metadata = 8 + size
    return content, Block(offset, metadata, content.size - metadata)


def end(schema: pa.Schema, blocks: Sequence[Block]) -> bytes:
    """Last bytes of a file: footer, length of the footer, magic number."""
    footer = _footer(schema, blocks)
    return footer + struct.pack("<i", len(footer)) + MAGIC


def blocks_of(footer: bytes) -> Iterator[Block]:
    """Locations of the batches in a footer; nothing for a footer that is damaged."""
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
    """Offset of the footer's reference to the list of batches."""
    (root,) = struct.unpack_from("<I", footer)
    (to_vtable,) = struct.unpack_from("<i", footer, root)
    (field,) = struct.unpack_from("<H", footer, root - to_vtable + 4 + 2 * _BATCHES_FIELD)
    return int(root + field)


def _footer(schema: pa.Schema, blocks: Sequence[Block]) -> bytes:
    """Footer of an empty file as a flatbuffer, whose reference is set to a list of batches at its end."""
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
