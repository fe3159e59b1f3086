"""Local cache of an object in object storage: a sparse file on the node's disk, filled block by block at first read.

An index file has the checksum of every cached block, and 0 for every other block. A block is
written before its checksum, and is used only if both match. A kill between the two writes, or bytes that the disk
loses, cost only another request. All processes of a node share both files. A lock on a block's index entry lets one
process fetch the block while the others wait.

Every request names the version of the object, so all blocks are of one version. Another version has other files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from nxtrain.common.errors import more_room
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import BucketSource

BLOCK_BYTES = 1 << 16
"""Bytes of a cached block, the smallest amount that a request fetches."""

RUN_BLOCKS = 32
"""Maximum number of adjacent blocks that one request fetches, which bounds the memory of a reader."""

_AHEAD = 16
"""Maximum number of concurrent prefetches. A request takes tens of milliseconds, whatever its size."""

_RESERVE_BYTES = 1 << 30
"""Bytes of disk space that the cache leaves free."""

_ENTRY = struct.Struct("<Q")


class CachedObject:
    """An object of a bucket, read through a cache file on this node's disk. `tag` is the version tag of the object."""

    def __init__(self, address: BucketPath, folder: Path) -> None:
        self._source = BucketSource(address)
        self.name = address
        self.num_bytes = self._source.num_bytes
        self.tag = self._source.tag
        self._num_blocks = -(-self.num_bytes // BLOCK_BYTES)
        folder.mkdir(parents=True, exist_ok=True)
        files = [
            folder / f"{_digest(address)}.{_digest(self.tag, self.num_bytes)}.{end}" for end in ("blocks", "index")
        ]
        for old in folder.glob(f"{_digest(address)}.*"):
            if old not in files:  # files of an earlier version; a process that still reads them has them open
                old.unlink(missing_ok=True)
        self._file = _opened(files[0], self.num_bytes)
        self._index = _opened(files[1], self._num_blocks * _ENTRY.size)
        # The system allocates memory only for the parts of the array that are written.
        self._is_here = np.zeros(self._num_blocks, np.bool_)
        self._stores = True
        self._underway: set[int] = set()
        self._changed = threading.Condition()
        self._close = weakref.finalize(self, _close, self._file, self._index)

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes from offset `start` into `view`; return their number, which is 0 at the end of the object."""
        view = view[: max(0, self.num_bytes - start)]
        for first, last in self._missing(start, start + len(view)):
            if self._stores:
                self._cache_blocks(first, last)
        if not self._stores and any(self._missing(start, start + len(view))):
            return self._source.read(view, start)
        if not len(view):
            return 0
        return os.preadv(self._file, [view], start)

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Prefetch: call a reading function in another thread, so that its blocks are cached when they are needed."""
        if self._stores:
            self._pool.submit(read, *args)

    def close(self) -> None:
        """Close the cache files; no thread may still read."""
        self._close()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="nxtrain-bucket")
        weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return pool

    def _missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges (first, last + 1) of blocks between two byte offsets that this process has not found in the cache."""
        first = None
        if start >= stop:
            return
        end = -(-stop // BLOCK_BYTES)
        for block in range(start // BLOCK_BYTES, end):
            if self._is_here[block]:
                if first is not None:
                    yield first, block
                first = None
            elif first is None:
                first = block
            elif block - first == RUN_BLOCKS:
                yield first, block
                first = block
        if first is not None:
            yield first, end

    def _cache_blocks(self, first: int, last: int) -> None:
        """Cache adjacent blocks; fetch those that no process of this node has fetched yet."""
        with self._claimed(first, last):
            for block in range(first, last):
                if not self._is_here[block]:
                    self._find(block)
            for begin, end in self._missing(first * BLOCK_BYTES, last * BLOCK_BYTES):
                self._fetch(begin * BLOCK_BYTES, min(end * BLOCK_BYTES, self.num_bytes))

    def _fetch(self, start: int, stop: int) -> None:
        """Fetch a byte range from the bucket, and write it to the cache file."""
        content, done = memoryview(bytearray(stop - start)), 0
        while done < len(content):
            done += self._source.read(content[done:], start + done)
        try:
            self._store(content, start)
        except OSError as error:
            if self._stores:
                what = f"WARNING: {self.name}: its blocks cannot be cached on this node: {error.strerror}"
                way_out = f"{more_room(error.errno)}, or choose another data.cache_dir"
                print(f"{what}; every read is a request; {way_out}", file=sys.stderr)
            self._stores = False

    def _find(self, block: int) -> None:
        """Mark a block as cached if its bytes in the cache file match its checksum."""
        (checksum,) = _ENTRY.unpack(os.pread(self._index, _ENTRY.size, block * _ENTRY.size))
        if not checksum:
            return
        start = block * BLOCK_BYTES
        content = os.pread(self._file, min(BLOCK_BYTES, self.num_bytes - start), start)
        self._is_here[block] = xxh3_64_intdigest(content) == checksum

    def _store(self, content: memoryview, start: int) -> None:
        space = os.fstatvfs(self._file)
        if space.f_bavail * space.f_frsize < _RESERVE_BYTES + len(content):
            raise OSError(errno.ENOSPC, f"the disk has less than {_RESERVE_BYTES >> 30} GiB free")
        _write(self._file, content, start)
        blocks = [content[begin : begin + BLOCK_BYTES] for begin in range(0, len(content), BLOCK_BYTES)]
        entries = b"".join(_ENTRY.pack(xxh3_64_intdigest(block)) for block in blocks)
        number = start // BLOCK_BYTES
        _write(self._index, memoryview(entries), number * _ENTRY.size)
        self._is_here[number : number + len(blocks)] = True

    @contextmanager
    def _claimed(self, first: int, last: int) -> Iterator[None]:
        """Hold locks of a range of blocks, so that no other thread or process of this node fetches them."""
        blocks = set(range(first, last))
        with self._changed:
            self._changed.wait_for(lambda: self._underway.isdisjoint(blocks))
            self._underway |= blocks
        length, offset = (last - first) * _ENTRY.size, first * _ENTRY.size
        try:
            # File locks belong to processes. A lock that would deadlock is refused, and its block is fetched twice.
            with suppress(OSError):
                fcntl.lockf(self._index, fcntl.LOCK_EX, length, offset)
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(self._index, fcntl.LOCK_UN, length, offset)
            with self._changed:
                self._underway -= blocks
                self._changed.notify_all()


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(tuple(map(str, parts))).encode(), digest_size=8).hexdigest()


def _opened(path: Path, num_bytes: int) -> int:
    """Open a file of a given length for reading and writing; create the file if it is absent."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(file, num_bytes)
    return file


def _write(file: int, content: memoryview, start: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], start + done)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
