"""Checksums of the token files that a run prepares, in a file next to each; readers verify every block.

A block is verified each time that one of its rows is read. A start is therefore fast for files of any length, and bytes
that a disk loses later are found too. XXH3 of 64 KiB takes a few microseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location

BLOCK_BYTES = 1 << 16
"""Bytes of ids in a block. A row is read with its whole block, which takes a disk hardly longer than the row alone."""

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"NXTSUMS1"
_SEAL = struct.Struct("<Q")


@dataclass(frozen=True)
class Checksums:
    """Checksums of a whole token file.

    Attributes:
        num_bytes: Length of the ids in bytes.
        header: XXH3 of the bytes before the ids.
        blocks: (n,) XXH3 of each `BLOCK_BYTES` of ids.
    """

    num_bytes: int
    header: int
    blocks: NDArray[np.uint64]

    def is_header(self, content: bytes) -> bool:
        """True if `content` equals the bytes before the ids."""
        return xxh3_64_intdigest(content) == self.header

    def is_block(self, index: int, content: memoryview) -> bool:
        """True if `content` equals a block."""
        return xxh3_64_intdigest(content) == int(self.blocks[index])

    def span(self, index: int) -> tuple[int, int]:
        """Bounds of a block: offset of its first byte among the ids, and the offset after its last."""
        return index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, self.num_bytes)

    def sealed(self) -> bytes:
        """Content of the checksum file, which ends with a checksum of the file itself."""
        content = _HEAD.pack(_MAGIC, self.num_bytes, self.header) + self.blocks.astype("<u8").tobytes()
        return content + _SEAL.pack(xxh3_64_intdigest(content))

    @staticmethod
    def of(sealed: bytes) -> Checksums:
        """Decode the content of a checksum file.

        Raises:
            ValueError: The content differs from the written bytes.
        """
        content, seal = sealed[: -_SEAL.size], sealed[-_SEAL.size :]
        whole = len(content) >= _HEAD.size and content.startswith(_MAGIC)
        if not whole or seal != _SEAL.pack(xxh3_64_intdigest(content)):
            raise ValueError("the checksums are not those that were written")
        _, num_bytes, header = _HEAD.unpack_from(content)
        return Checksums(num_bytes, header, np.frombuffer(content, "<u8", offset=_HEAD.size).astype(np.uint64))


class Summing:
    """Computes the checksums of ids during the write, one piece after the other."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._num_bytes = 0
        self._blocks: list[int] = []

    def add(self, content: memoryview) -> None:
        """Add the next bytes."""
        left = content.cast("B")
        self._num_bytes += len(left)
        if self._rest:
            missing = BLOCK_BYTES - len(self._rest)
            self._rest += left[:missing]
            left = left[missing:]
            if len(self._rest) < BLOCK_BYTES:
                return
            self._blocks.append(xxh3_64_intdigest(self._rest))
            self._rest.clear()
        whole = len(left) // BLOCK_BYTES * BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            self._blocks.append(xxh3_64_intdigest(left[start : start + BLOCK_BYTES]))
        self._rest += left[whole:]

    @property
    def rest(self) -> int:
        """Checksum of the bytes after the last whole block."""
        return xxh3_64_intdigest(self._rest)

    def take(self) -> bytes:
        """Checksums of the whole blocks since the last call, 8 bytes each; `finish` omits these blocks."""
        taken = np.array(self._blocks, "<u8").tobytes()
        self._blocks.clear()
        return taken

    def finish(self, header: bytes) -> Checksums:
        """Checksums of the whole file; `header` is the bytes before the ids."""
        if self._rest:
            self._blocks.append(xxh3_64_intdigest(self._rest))
        return Checksums(self._num_bytes, xxh3_64_intdigest(header), np.array(self._blocks, np.uint64))


class VerifiedBlocks:
    """Reader of ids that reads and verifies whole blocks.

    Args:
        read: Fills a view with the bytes at an offset, counted from the first id.
    """

    def __init__(self, path: Location, checksums: Checksums, read: Callable[[int, memoryview], None]) -> None:
        self._path, self._checksums = path, checksums
        self._read = read
        self._last = -1, memoryview(b"")  # index and content of the block that was read last

    def forget(self) -> None:
        """Drop the cached block, because the file has changed."""
        self._last = -1, memoryview(b"")

    def fill(self, start: int, view: memoryview) -> None:
        """Fill a view with the bytes of ids at an offset.

        Raises:
            DataError: A block's content differs from the written bytes.
        """
        done = 0
        while done < len(view):
            index = (start + done) // BLOCK_BYTES
            content, offset = self._block(index), (start + done) % BLOCK_BYTES
            part = content[offset : offset + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)

    def _block(self, index: int) -> memoryview:
        last, content = self._last
        if index != last:
            first, stop = self._checksums.span(index)
            content = memoryview(bytearray(stop - first))
            self._read(first, content)
            if not self._checksums.is_block(index, content):
                raise changed(self._path, f"bytes {first:,} to {stop:,} of its ids are")
            self._last = index, content
        return content


def checksums_of(path: Path) -> Path:
    """Path of the checksum file of a token file."""
    return path.with_name(f"{path.name}.xxh3")


def changed(path: Location, what: str) -> DataError:
    """Make the error for a token file whose content is not what the run has prepared."""
    return DataError(
        f"{path} is damaged: {what} not what was written when the data was prepared; delete it, and the next start "
        "prepares it again"
    )
