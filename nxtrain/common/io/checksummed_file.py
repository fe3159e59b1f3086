"""Reader and writer of files in checksummed blocks with direct I/O, so that damage is detected.

One thread transfers a block while another computes the checksum of the next block, so that the disk never waits. On a
file system without direct I/O, such as tmpfs, blocks go through the page cache.
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
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict
from xxhash import xxh3_64_hexdigest

from nxtrain.common.errors import DamagedError
from nxtrain.common.io.read_retry import damage, retry_budget
from nxtrain.common.io.regular import NotRegularError, open_regular


class TransferCounter:
    """Counter of bytes read, uploaded or downloaded by all threads; its growth tells slow storage from a hang."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Add to the number of transferred bytes."""
        with self._lock:
            self._num_bytes += num_bytes

    def __call__(self) -> int:
        """Number of bytes transferred so far."""
        return self._num_bytes


transferred = TransferCounter()
"""Counter of the bytes that this process has transferred."""


BLOCK_BYTES = 1 << 24
"""Bytes of a checksummed block: large enough for full disk or network speed, and small next to a model."""

_SECTOR_BYTES = 4096
_DEPTH = 4
"""Number of blocks in memory: one is filled or consumed while the others are transferred and checked."""
_READERS = 2
"""Number of reader threads: one computes a checksum while the other reads from the disk."""

_DIRECT = getattr(os, "O_DIRECT", 0)


class FileDigest(BaseModel):
    """Length and block checksums of a file, as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_bytes: int
    block_bytes: int
    """Bytes of each block; the last may be shorter."""
    xxh3: tuple[str, ...]
    """XXH3 checksum of each block, 64 bits in hexadecimal. XXH3 is as fast as memory, so it costs no bandwidth."""

    def block(self, index: int) -> tuple[int, int]:
        """Byte offsets of the beginning and the end of a block in the file."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.num_bytes)


class ChecksummedWriter:
    """Sequential writer of a new file in checksummed blocks; `close` syncs the file to the disk."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file, self._direct = _open(lambda more: os.open(path, flags | more, 0o644))
        # One thread, so that the disk gets blocks in sequence, which is fastest.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="nxtrain-write")
        self._underway: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        self._free: deque[mmap.mmap] = deque()
        self._block: mmap.mmap | None = None
        self._filled, self._num_bytes = 0, 0
        self._checksums: list[str] = []

    def write(self, data: memoryview, *, stays: bool = False) -> None:
        """Append bytes to the file.

        Args:
            data: The bytes.
            stays: The bytes stay unchanged until `close`, so that whole aligned blocks are written without a copy.
        """
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            is_block = stays and not self._filled and len(rest) >= BLOCK_BYTES
            if is_block and rest.__array_interface__["data"][0] % _SECTOR_BYTES == 0:
                self._send(rest.data, BLOCK_BYTES)
                rest = rest[BLOCK_BYTES:]
                continue
            if self._block is None:
                self._block = self._free.popleft() if self._free else aligned_memory(BLOCK_BYTES)
            part = rest[: BLOCK_BYTES - self._filled]
            # numpy copies without holding Python's lock, which the other thread needs between its calls.
            np.frombuffer(self._block, np.uint8)[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def close(self) -> FileDigest:
        """Sync the file to the disk, and return its length and checksums."""
        self._flush()
        while self._underway:
            self._await()
        os.ftruncate(self._file, self._num_bytes)
        os.fsync(self._file)
        return FileDigest(num_bytes=self._num_bytes, block_bytes=BLOCK_BYTES, xxh3=tuple(self._checksums))

    def __enter__(self) -> ChecksummedWriter:
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

    def _send(self, block: memoryview, length: int, buffer: mmap.mmap | None = None) -> None:
        """Write the first `length` bytes of a block in the background; `buffer`, if given, is reused afterwards."""
        self._underway.append((self._disk.submit(self._transfer, block, self._num_bytes, length), buffer))
        self._checksums.append(xxh3_64_hexdigest(block[:length]))
        self._num_bytes += length
        if len(self._underway) == _DEPTH:
            self._await()

    def _await(self) -> None:
        written, buffer = self._underway.popleft()
        written.result()
        if buffer is not None:
            self._free.append(buffer)

    def _transfer(self, block: memoryview, where: int, length: int) -> None:
        direct, sent = self._direct, 0
        whole = length
        if direct:
            # Direct access writes whole sectors only; `close` truncates the excess.
            whole = -(-length // _SECTOR_BYTES) * _SECTOR_BYTES
        while sent < whole:
            try:
                sent += os.pwrite(self._file, block[sent:whole], where + sent)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                _disable_direct_access(self._file)
                self._direct = direct = False
                whole = length


class ByteSource(Protocol):
    """Readable bytes of a file on any storage."""

    @property
    def name(self) -> Path | str:
        """Path or address of the file."""

    @property
    def num_bytes(self) -> int:
        """Length of the file in bytes."""

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes from offset `start` into `view`, perhaps fewer than fit; return their number, 0 at the end."""

    def close(self) -> None:
        """Close the file."""


class FileSource:
    """A file on a local or shared disk, read with direct I/O where possible."""

    def __init__(self, path: Path) -> None:
        self.name = path
        try:
            self._file, self._direct = retry_budget.read(lambda: _open(partial(open_regular, path)), path)
        except OSError as error:
            raise damage(path, error) from error
        self.num_bytes = os.fstat(self._file).st_size

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes into a view; see `ByteSource.read`."""
        try:
            count = retry_budget.read(lambda: self._read(view, start), self.name)
        except OSError as error:
            raise damage(self.name, error) from error
        transferred.note(count)
        return count

    def _read(self, view: memoryview, start: int) -> int:
        try:
            return os.preadv(self._file, [view], start)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        _disable_direct_access(self._file)  # several threads may do so: the call is idempotent
        return os.preadv(self._file, [view], start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class ChecksummedReader:
    """Reader that verifies each block of a file, and falls back to other copies of the file for damaged blocks.

    Args:
        copies: Path of the file, or functions that open its copies, the nearest first. A copy is opened only if all
            earlier copies are damaged.
        stored: Length and checksums of the undamaged file.

    Attributes:
        damage: Errors of damaged copies.
    """

    def __init__(self, copies: Path | Sequence[Callable[[], ByteSource]], stored: FileDigest) -> None:
        self._stored = stored
        if isinstance(copies, Path):
            copies = [partial(FileSource, copies)]
        self._unopened = deque(copies)
        self._sources: list[ByteSource] = []
        self._opening = Lock()
        self.damage: list[DamagedError] = []
        if not self._has(0):
            raise self.damage[-1]

    def blocks(self, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Iterate over the blocks with the given indices, as pairs of offset in the file and verified content.

        A content is valid only until the next iteration.
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

    def __enter__(self) -> ChecksummedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self._sources:
            source.close()

    def _has(self, number: int) -> bool:
        """True if more than `number` copies have the expected length. Further copies are opened as needed."""
        with self._opening:
            while len(self._sources) <= number and self._unopened:
                try:
                    source = self._unopened.popleft()()
                    if source.num_bytes != self._stored.num_bytes:
                        source.close()
                        reason = f"it has {source.num_bytes:,} bytes instead of {self._stored.num_bytes:,}"
                        raise DamagedError(source.name, reason)
                    self._sources.append(source)
                except DamagedError as error:
                    self.damage.append(error)
        return len(self._sources) > number

    def _read(self, index: int, buffer: mmap.mmap) -> memoryview:
        start, stop = self._stored.block(index)
        number = 0
        while True:
            source = self._sources[number]
            try:
                content = _filled(source, memoryview(buffer), start, stop - start)
                if xxh3_64_hexdigest(content) != self._stored.xxh3[index]:
                    raise DamagedError(source.name, f"bytes {start:,} to {stop:,} are not those that were written")
                return content
            except (DamagedError, OSError) as error:
                number += 1
                if not self._has(number):
                    raise
                if isinstance(error, DamagedError):
                    self.damage.append(error)
                else:
                    self.damage.append(DamagedError(source.name, f"{error}"))


def digest_of(path: Path) -> FileDigest:
    """Read a file from the disk, and compute its length and checksums."""
    source, checksums = FileSource(path), list[str]()
    try:
        view = memoryview(aligned_memory(BLOCK_BYTES))
        for start in range(0, source.num_bytes, BLOCK_BYTES):
            checksums.append(
                xxh3_64_hexdigest(_filled(source, view, start, min(BLOCK_BYTES, source.num_bytes - start)))
            )
    finally:
        source.close()
    return FileDigest(num_bytes=source.num_bytes, block_bytes=BLOCK_BYTES, xxh3=tuple(checksums))


def verify(path: Path, stored: FileDigest) -> None:
    """Read a file from the disk, and raise a DamagedError if its content does not match its checksums."""
    with ChecksummedReader(path, stored) as reader:
        for _ in reader.blocks(range(len(stored.xxh3))):
            pass


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Allocate page-aligned memory, which direct I/O requires."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # on systems without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # mapped and pinned in a few steps, not in thousands
    return memory


def _filled(source: ByteSource, view: memoryview, start: int, length: int) -> memoryview:
    """Read `length` bytes from offset `start` into the beginning of `view`, and return the filled part."""
    received = 0
    while received < length:
        count = source.read(view[received:], start + received)
        if count == 0:
            raise DamagedError(source.name, "it became shorter while it was read")
        received += count
    return view[:length]


def _disable_direct_access(file: int) -> None:
    """Clear O_DIRECT of an open file. Some file systems accept the flag at opening but refuse direct I/O later."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)


def _open(open_file: Callable[[int], int]) -> tuple[int, bool]:
    """Open a file by a function of further flags; return its descriptor, and True if it uses direct I/O."""
    try:
        return open_file(_DIRECT), bool(_DIRECT)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | NotRegularError):
            raise
        return open_file(0), False
