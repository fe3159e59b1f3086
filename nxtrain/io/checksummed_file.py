"""Files that know when they are damaged: written and read in blocks, each with its checksum, past the page cache.

A block is transferred by one thread while another checks the next, so that the disk never waits. Where a file system
has no direct access, such as tmpfs, the same happens through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_hexdigest

from nxtrain.errors import DamagedError
from nxtrain.io.read_retry import damage, unsteady
from nxtrain.io.regular import NotRegularError, open_regular
from nxtrain.io.transfer_progress import arrived

BLOCK_BYTES = 1 << 24
"""Enough for a disk's or a network's full speed, and little beside a model."""

_SECTOR_BYTES = 4096
_DEPTH = 4
"""Blocks underway: one is filled or used, the others are transferred and checked."""
_READERS = 2
"""Threads: one computes a checksum while the other has the disk."""

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
        # One thread, so that the disk sees one block after the other, as it likes best.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="nxtrain-write")
        self._underway: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        self._free: deque[mmap.mmap] = deque()
        self._block: mmap.mmap | None = None
        self._filled, self._num_bytes = 0, 0
        self._checksums: list[str] = []

    def write(self, data: memoryview, *, stays: bool = False) -> None:
        """Append bytes.

        Args:
            data: The bytes.
            stays: They stay as they are until `close`, so that whole blocks can be written from where they lie.
        """
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            if stays and not self._filled and len(rest) >= BLOCK_BYTES and _address(rest) % _SECTOR_BYTES == 0:
                self._send(rest.data, BLOCK_BYTES)
                rest = rest[BLOCK_BYTES:]
                continue
            if self._block is None:
                self._block = self._free.popleft() if self._free else aligned_memory(BLOCK_BYTES)
            part = rest[: BLOCK_BYTES - self._filled]
            # numpy copies without Python's lock, for which the other thread would wait between its calls.
            np.frombuffer(self._block, np.uint8)[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def close(self) -> Stored:
        """Wait until the disk holds the file, and tell what it is."""
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
        self._disk.shutdown(cancel_futures=True)
        os.close(self._file)

    def _flush(self) -> None:
        if self._block is not None:
            self._send(memoryview(self._block), self._filled, self._block)
            self._block, self._filled = None, 0

    def _send(self, block: memoryview, length: int, own: mmap.mmap | None = None) -> None:
        """Let the disk have what fills a block so far; if it is a block of our own, it is free again afterwards."""
        self._underway.append((self._disk.submit(self._transfer, block, self._num_bytes, length), own))
        self._checksums.append(xxh3_64_hexdigest(block[:length]))
        self._num_bytes += length
        if len(self._underway) == _DEPTH:
            self._await()

    def _await(self) -> None:
        written, own = self._underway.popleft()
        written.result()
        if own is not None:
            self._free.append(own)

    def _transfer(self, block: memoryview, where: int, length: int) -> None:
        direct, sent = self._direct, 0
        # Direct access knows whole sectors only; what is too much is cut off in the end.
        whole = -(-length // _SECTOR_BYTES) * _SECTOR_BYTES if direct else length
        while sent < whole:
            try:
                sent += os.pwrite(self._file, block[sent:whole], where + sent)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                _go_by_the_cache(self._file)
                self._direct = direct = False
                whole = length


class Source(Protocol):
    """The bytes of a file, wherever they lie."""

    @property
    def name(self) -> Path | str:
        """Where they lie."""

    @property
    def num_bytes(self) -> int:
        """How many there are."""

    def read(self, view: memoryview, start: int) -> int:
        """Bring bytes from `start` on, as many as are there and fit, and tell how many; 0 at the end."""

    def close(self) -> None:
        """Read no more."""


class FileSource:
    """A file of a disk.

    Args:
        path: The file.

    Raises:
        DamagedError: It is absent.
    """

    def __init__(self, path: Path) -> None:
        self.name = path
        try:
            self._file, self._direct = unsteady.read(lambda: _open_to_read(path), path)
        except OSError as error:
            raise damage(path, error) from error
        self.num_bytes = os.fstat(self._file).st_size

    def read(self, view: memoryview, start: int) -> int:
        """See `Source`."""
        try:
            count = unsteady.read(lambda: self._read(view, start), self.name)
        except OSError as error:
            raise damage(self.name, error) from error
        arrived.note(count)
        return count

    def _read(self, view: memoryview, start: int) -> int:
        try:
            return os.preadv(self._file, [view], start)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        _go_by_the_cache(self._file)  # by each thread that comes here, which changes nothing
        return os.preadv(self._file, [view], start)

    def close(self) -> None:
        """See `Source`."""
        os.close(self._file)


class BlockReader:
    """Reads blocks of a file, each of them verified, and from another copy where one has it wrong.

    Args:
        copies: The file; or what opens its copies, the nearest first, each when those before do not suffice.
        stored: What it was when it was written.

    Attributes:
        damage: What was wrong with copies although others had it right.

    Raises:
        DamagedError: All copies are absent, or of another length.
    """

    def __init__(self, copies: Path | Sequence[Callable[[], Source]], stored: Stored) -> None:
        self._stored = stored
        self._unopened = deque([partial(FileSource, copies)] if isinstance(copies, Path) else copies)
        self._sources: list[Source] = []
        self._opening = Lock()
        self.damage: list[DamagedError] = []
        if not self._has(0):
            raise self.damage[-1]

    def blocks(self, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Each of these blocks, ascending, as its first byte's place in the file and its content.

        The content is valid until the next is asked for.

        Raises:
            DamagedError: A block is not what was written.
        """
        pool = ThreadPoolExecutor(_READERS, thread_name_prefix="nxtrain-read")
        free = deque(aligned_memory(self._stored.block_bytes) for _ in range(min(_DEPTH, len(wanted))))
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
        for source in self._sources:
            source.close()

    def _has(self, number: int) -> bool:
        """Whether there are more copies of the right length than this; they are opened."""
        with self._opening:
            while len(self._sources) <= number and self._unopened:
                with suppress(DamagedError):
                    self._sources.append(self._opened(self._unopened.popleft()))
        return len(self._sources) > number

    def _opened(self, source_of: Callable[[], Source]) -> Source:
        try:
            source = source_of()
            if source.num_bytes == self._stored.num_bytes:
                return source
            source.close()
            reason = f"it has {source.num_bytes:,} bytes instead of {self._stored.num_bytes:,}"
            raise DamagedError(source.name, reason)
        except DamagedError as error:
            self.damage.append(error)
            raise

    def _read(self, index: int, buffer: mmap.mmap) -> memoryview:
        number = 0
        while True:
            source = self._sources[number]
            try:
                return self._verified(source, index, memoryview(buffer))
            except (DamagedError, OSError) as error:
                number += 1
                if not self._has(number):
                    raise
                damaged = error if isinstance(error, DamagedError) else DamagedError(source.name, f"{error}")
                self.damage.append(damaged)

    def _verified(self, source: Source, index: int, view: memoryview) -> memoryview:
        start, stop = self._stored.block(index)
        received = 0
        while received < stop - start:
            count = source.read(view[received:], start + received)
            if count == 0:
                raise DamagedError(source.name, "it became shorter while it was read")
            received += count
        content = view[: stop - start]
        if xxh3_64_hexdigest(content) != self._stored.checksums[index]:
            raise DamagedError(source.name, f"bytes {start:,} to {stop:,} are not those that were written")
        return content


def verify(path: Path, stored: Stored) -> None:
    """Read a file from the disk and make sure that it is whole.

    Raises:
        DamagedError: It is not.
    """
    with BlockReader(path, stored) as reader:
        for _ in reader.blocks(range(len(stored.checksums))):
            pass


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Memory as direct access wants it."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # of systems that have no such pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # mapped and pinned in a few steps, not in thousands
    return memory


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _go_by_the_cache(file: int) -> None:
    """Leave direct access, where a file system takes it when a file is opened and refuses it later."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)


def _open_to_read(path: Path) -> tuple[int, bool]:
    """A descriptor of a regular file, and whether it goes past the page cache."""
    try:
        return open_regular(path, _DIRECT), bool(_DIRECT)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | NotRegularError):
            raise
        return open_regular(path), False


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache."""
    try:
        return os.open(path, flags | _DIRECT, 0o644), bool(_DIRECT)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        return os.open(path, flags, 0o644), False
