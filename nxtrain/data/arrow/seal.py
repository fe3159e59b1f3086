"""Checksums of a prepared Arrow file, stored between its last record batch and its footer.

Arrow readers find the batches through the footer, or read up to the end of the stream, and ignore the bytes between. A
table has the XXH3 checksum of each block before the table. A seal has the XXH3 checksums of the parts that are read at
opening: the footer, and the metadata of all batches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow import ipc
from nxtrain.data.storage import DataFile, read_exactly

BLOCK_BYTES = 1 << 16
"""Bytes of a checksummed block. Reading a row means reading its whole block, which hardly takes a disk longer."""

ENTRY_BYTES = 8
"""Bytes of one block checksum in the table."""

_SEAL = struct.Struct("<8sQQQ")
_MAGIC = b"NXTSEAL1"


class DamagedBlockError(Exception):
    """Error for a block whose bytes from `start` up to `stop` differ from the written bytes."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.start, self.stop = start, stop


class Sealing:
    """Accumulator of the checksums of a file that grows batch by batch.

    Args:
        rest: Bytes of the file after its last complete block.
        metadata: Checksums of the metadata of all written batches.
    """

    def __init__(self, rest: bytes = b"", metadata: Sequence[int] = ()) -> None:
        self._rest, self._metadata = bytearray(), list(metadata)
        self.add(memoryview(rest))

    @property
    def rest(self) -> int:
        """Checksum of the bytes after the last complete block."""
        return xxh3_64_intdigest(self._rest)

    def add(self, content: memoryview) -> bytes:
        """Add the next bytes of the file; return the table entries of the blocks that are completed."""
        left = content.cast("B")
        entries = b""
        while len(self._rest) + len(left) >= BLOCK_BYTES:
            missing = BLOCK_BYTES - len(self._rest)
            block = left[:missing]
            if self._rest:
                self._rest += block
                entries += _entry(self._rest)
                self._rest.clear()
            else:
                entries += _entry(block)
            left = left[missing:]
        self._rest += left
        return entries

    def add_batch(self, content: memoryview, metadata_bytes: int) -> tuple[bytes, int]:
        """Add a record batch, which begins with its metadata; return entries as `add`, and the metadata's checksum."""
        checksum = xxh3_64_intdigest(content[:metadata_bytes])
        self._metadata.append(checksum)
        return self.add(content), checksum

    def finish(self, num_bytes: int, footer: bytes) -> bytes:
        """Table entry of the last block, and the seal.

        Args:
            num_bytes: Number of bytes before the table.
            footer: All bytes after the seal.
        """
        last = b""
        if self._rest:
            last = _entry(self._rest)
        return last + _SEAL.pack(_MAGIC, num_bytes, xxh3_64_intdigest(footer), _digest(self._metadata))


def _entry(block: bytearray | memoryview) -> bytes:
    return xxh3_64_intdigest(block).to_bytes(ENTRY_BYTES, "little")


class CheckedFile:
    """A prepared file with checksums; each block is verified at its first read.

    Args:
        num_bytes: Number of bytes before the table of checksums.
    """

    def __init__(self, file: DataFile, num_bytes: int) -> None:
        self._file, self._covered = file, num_bytes
        self._is_verified = bytearray(-(-num_bytes // BLOCK_BYTES))
        self._version = file.version()
        self.name, self.num_bytes = file.name, file.num_bytes

    def read(self, view: memoryview, start: int) -> int:
        """Read verified bytes; see `DataFile.read`.

        Raises:
            DamagedBlockError: A block's content differs from the written bytes.
        """
        first, stop = start // BLOCK_BYTES, -(-(start + len(view)) // BLOCK_BYTES)
        if self._is_verified.find(0, first, stop) >= 0:
            for block in range(first, min(stop, len(self._is_verified))):
                if not self._is_verified[block]:
                    self._verify(block)
        return self._file.read(view, start)

    def verified(self) -> Iterator[tuple[int, DamagedBlockError | None]]:
        """Verify all blocks of the file; yield the number of bytes of each block, and the error if it is damaged."""
        for block in range(len(self._is_verified)):
            damage = None
            try:
                self._verify(block)
            except DamagedBlockError as error:
                damage = error
            yield min(BLOCK_BYTES, self._covered - block * BLOCK_BYTES), damage

    def forget_changed(self) -> None:
        """Verify all blocks again if the file was modified in place since the last call."""
        version = self._file.version()
        if version != self._version:
            self._is_verified = bytearray(len(self._is_verified))
            self._version = version

    def table(self) -> bytes:
        """Checksums of all blocks, which identify the content."""
        return bytes(read_exactly(self._file, ENTRY_BYTES * len(self._is_verified), self._covered))

    def version(self) -> object:
        """Value that changes when the content of the file is modified in place."""
        return self._file.version()

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Prefetch: call a reading function in another thread; see `DataFile.ahead`."""
        self._file.ahead(read, *args)

    def _verify(self, block: int) -> None:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._covered)
        content = read_exactly(self._file, stop - start, start)
        entry = bytes(read_exactly(self._file, ENTRY_BYTES, self._covered + block * ENTRY_BYTES))
        if xxh3_64_intdigest(content) != int.from_bytes(entry, "little"):
            raise DamagedBlockError(start, stop)
        self._is_verified[block] = 1


def checked(file: DataFile, footer_start: int) -> CheckedFile | None:
    """Wrap a file for verified reads, after verifying its footer and metadata; None if the file has no checksums."""
    start = footer_start - _SEAL.size
    sealed = bytes(read_exactly(file, _SEAL.size, start)) if start > 0 else b""
    if not sealed.startswith(_MAGIC):
        return None
    _, num_bytes, footer_sum, metadata_sum = _SEAL.unpack(sealed)
    footer = bytes(read_exactly(file, file.num_bytes - footer_start, footer_start))
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    if num_bytes + num_blocks * ENTRY_BYTES != start or xxh3_64_intdigest(footer) != footer_sum:
        raise DataError(_changed(file.name, "its footer"))
    metadata = [read_exactly(file, block.metadata, block.offset) for block in ipc.blocks_of(footer)]
    if _digest([xxh3_64_intdigest(content) for content in metadata]) != metadata_sum:
        raise DataError(_changed(file.name, "the metadata of a batch"))
    return CheckedFile(file, num_bytes)


def _digest(checksums: Sequence[int]) -> int:
    digest = xxh3_64()
    for checksum in checksums:
        digest.update(checksum.to_bytes(ENTRY_BYTES, "little"))
    return digest.intdigest()


def _changed(name: Location, what: str) -> str:
    return f"{name} is damaged: {what} is not what was written when the corpus was prepared; prepare it again"
