"""Documents of a column of strings or bytes, read through views that know the size of their buffers.

An Arrow file says itself where its documents lie. pyarrow believes it: its casts, its count of nulls and its scalars of
a damaged file read outside of the buffers, and end the process. Nothing here calls them. Every number that comes from
the file is compared with the size of the buffer that it points into.

Reference: Arrow columnar format, "Variable-size Binary Layout", "Variable-size Binary View Layout".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

_VIEW_BYTES = 16
_INLINE_BYTES = 12
"""Longest text that is stored inside of a view, in bytes."""


def is_string(kind: Any) -> bool:
    """True for each type of text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: Any) -> bool:
    """True for each type of bytes of any length."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def document_bytes(column: pa.Array, limit: int) -> Iterator[bytes | int | None]:
    """Copies of the documents of a column: None for null, and the length alone for a document above the limit.

    Args:
        column: Strings, bytes, or a dictionary of them, with offsets of any width, or views.
        limit: Longest document that is copied, in bytes.
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
        _check_order(offsets, len(content))
        for (begin, end), is_valid in zip(pairwise(offsets), valid, strict=True):
            if not is_valid:
                yield None
            elif end - begin <= limit:
                yield bytes(content[begin:end])
            else:
                yield end - begin


def _of_dictionary(column: pa.Array, valid: Sequence[bool], limit: int) -> Iterator[bytes | int | None]:
    indices = _numbers(column.buffers()[1], column.type.index_type.to_pandas_dtype(), column.offset, len(column))
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
    """View of a range of numbers in a buffer, after a check that the buffer has the range."""
    dtype = np.dtype(dtype)
    size = buffer.size if buffer is not None else 0
    if (start + number) * dtype.itemsize > size:
        raise pa.ArrowInvalid(f"a buffer has {size:,} bytes, and {number:,} rows need more")
    return np.frombuffer(buffer, dtype, number, start * dtype.itemsize)


def _valid(buffer: Any, start: int, number: int) -> Sequence[bool]:
    """Validity of each row; all are valid without a buffer."""
    if buffer is None:
        return [True] * number
    first, last = start // 8, -(-(start + number) // 8)
    bits = np.unpackbits(_numbers(buffer, np.uint8, first, last - first), bitorder="little")
    valid: Sequence[bool] = bits[start - 8 * first :][:number].astype(bool).tolist()
    return valid


def _check_order(offsets: Sequence[int], size: int) -> None:
    last = 0
    for offset in offsets:
        if offset < last:
            raise pa.ArrowInvalid("the offsets of the documents descend")
        last = offset
    if last > size:
        raise pa.ArrowInvalid(f"a document ends at byte {last:,} of {size:,}")
