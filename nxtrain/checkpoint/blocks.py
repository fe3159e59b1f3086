"""Files that know when they are damaged: written and read in blocks, each with its checksum, past the page cache.

A block is copied, checked and transferred at the same time, each by another thread, so that the disk never waits. Where
a file system has no direct access, such as tmpfs, the same happens through the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from xxhash import xxh3_64_hexdigest

from nxtrain.errors import DamagedError

BLOCK_BYTES = 1 << 24
"""Enough for a disk's or a network's full speed, and little beside a model."""

_SECTOR_BYTES = 4096
_DEPTH = 4
"""Blocks underway: one is filled or used, the others are transferred and checked."""
_THREADS = 2
"""One computes a checksum while the other has the disk."""

_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Stored:
    """What a file is when it is whole.

    Args:
        num_bytes: Its length.
        block_bytes: Length of each block but the last.
        checksums: XXH3 of each block, 64 bits in hexadecimal; it is as fast as memory, so that it costs no bandwidth.
    """

    num_bytes: int
    block_bytes: int
    checksums: tuple[str, ...]

    def block(self, index: int) -> tuple[int, int]:
        """First byte of a block, and the one after its last."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.num_bytes)


class BlockWriter:
    """Writes a new file from its first byte to its last; what `close` returns is on the disk.

    Args:
        path: The file; one that is there already is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nxtrain-write")
        self._free = deque(_memory(BLOCK_BYTES) for _ in range(_DEPTH))
        self._underway: deque[tuple[Future[str], mmap.mmap]] = deque()
        self._block, self._filled, self._num_bytes = self._free.popleft(), 0, 0
        self._checksums: list[str] = []

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            part = rest[: BLOCK_BYTES - self._filled]
            # numpy copies without Python's lock, for which the other threads would wait between their calls.
            np.frombuffer(self._block, np.uint8)[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def close(self) -> Stored:
        """Wait until the disk holds the file, and tell what it is."""
        if self._filled:
            self._flush()
        while self._underway:
            self._await()
        os.ftruncate(self._file, self._num_bytes)
        os.fsync(self._file)
        return Stored(self._num_bytes, BLOCK_BYTES, tuple(self._checksums))

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)

    def _flush(self) -> None:
        where, length = self._num_bytes, self._filled
        self._underway.append((self._pool.submit(self._transfer, self._block, where, length), self._block))
        self._num_bytes, self._filled = where + length, 0
        if not self._free:
            self._await()
        self._block = self._free.popleft()

    def _await(self) -> None:
        checksum, block = self._underway.popleft()
        self._checksums.append(checksum.result())
        self._free.append(block)

    def _transfer(self, block: mmap.mmap, where: int, length: int) -> str:
        with memoryview(block) as view:
            # Direct access knows whole sectors only; what is too much is cut off in the end.
            whole = -(-length // _SECTOR_BYTES) * _SECTOR_BYTES if self._direct else length
            sent = 0
            while sent < whole:
                sent += os.pwrite(self._file, view[sent:whole], where + sent)
            return xxh3_64_hexdigest(view[:length])


class BlockReader:
    """Reads blocks of a file, each of them verified.

    Args:
        path: The file.
        stored: What it was when it was written.

    Raises:
        DamagedError: It is absent, or of another length.
    """

    def __init__(self, path: Path, stored: Stored) -> None:
        self._path, self._stored = path, stored
        try:
            self._file, self._direct = _open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise DamagedError(path, "it is absent") from error
        if (found := os.fstat(self._file).st_size) != stored.num_bytes:
            os.close(self._file)
            raise DamagedError(path, f"it has {found:,} bytes instead of {stored.num_bytes:,}")

    def blocks(self, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Each of these blocks, ascending, as its first byte's place in the file and its content.

        The content is valid until the next is asked for.

        Raises:
            DamagedError: A block is not what was written.
        """
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nxtrain-read")
        free = deque(_memory(self._stored.block_bytes) for _ in range(min(_DEPTH, len(wanted))))
        underway: deque[tuple[int, Future[memoryview], mmap.mmap]] = deque()
        queue = deque(wanted)
        try:
            while queue or underway:
                while queue and free:
                    index, buffer = queue.popleft(), free.popleft()
                    underway.append((index, pool.submit(self._read, index, buffer), buffer))
                index, content, buffer = underway.popleft()
                with content.result() as view:
                    yield self._stored.block(index)[0], view
                free.append(buffer)
        finally:
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _read(self, index: int, buffer: mmap.mmap) -> memoryview:
        start, stop = self._stored.block(index)
        view = memoryview(buffer)
        received = 0
        while received < stop - start:
            count = os.preadv(self._file, [view[received:]], start + received)
            if count == 0:
                raise DamagedError(self._path, "it became shorter while it was read")
            received += count
        content = view[: stop - start]
        if xxh3_64_hexdigest(content) != self._stored.checksums[index]:
            raise DamagedError(self._path, f"bytes {start:,} to {stop:,} are not those that were written")
        return content


def verify(path: Path, stored: Stored) -> None:
    """Read a file from the disk and make sure that it is whole.

    Raises:
        DamagedError: It is not.
    """
    with BlockReader(path, stored) as reader:
        for _ in reader.blocks(range(len(stored.checksums))):
            pass


def _memory(num_bytes: int) -> mmap.mmap:
    """Memory for a block, aligned as direct access wants it."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # mapped and pinned in a few steps, not in thousands
    return memory


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache."""
    try:
        return os.open(path, flags | _DIRECT, 0o644), bool(_DIRECT)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        return os.open(path, flags, 0o644), False
