"""Files of corpora on disks and in buckets, opened once and read at any offset, and prepared files, written atomically.

A read looks up no name. Files of a disk are read, not mapped: a lost page of a mapped file ends the process by a
signal, without a message.
"""

from __future__ import annotations

import getpass
import io
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DamagedError, DataError, NxtrainError, StorageError, refused
from nxtrain.common.io import atomic
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.cached_object import CachedObject
from nxtrain.common.io.object_store import BucketSource, BucketStore, Location
from nxtrain.common.io.paths import listing
from nxtrain.common.io.regular import NotRegularError, open_regular
from nxtrain.config.cache_dir import fill, host_name

Tokens = NDArray[np.integer[Any]]

SHARD_ENDING = ".arrow"

STREAM_BYTES = 4 << 20
"""Bytes of a request for an object that is read once; a request takes tens of milliseconds, whatever its size."""


class DataFile(Protocol):
    """An open file of a corpus."""

    @property
    def name(self) -> Location:
        """Path or address."""

    @property
    def num_bytes(self) -> int:
        """Length when the file was opened."""

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes from `start` on into `view`, perhaps fewer than fit; return their number, 0 at the end.

        Raises:
            OSError: The storage fails.
            DataError: The file is gone, or has been replaced.
        """

    def version(self) -> object:
        """Value that differs after a change of the content in place."""

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Call a function that reads ahead, in another thread, if the storage is a bucket; do nothing for a disk."""


class LocalFile:
    """A file of a disk."""

    def __init__(self, path: Path) -> None:
        self.name = path
        self._file = open_regular(path)
        weakref.finalize(self, os.close, self._file)
        self.num_bytes = os.fstat(self._file).st_size

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes into a view; see `DataFile.read`."""
        return os.preadv(self._file, [view], start)

    def version(self) -> object:
        """Value that differs after a change of the content in place."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Call nothing: the system reads ahead."""


class RemoteFile:
    """An object of a bucket, whose bytes come to this node when they are read.

    Args:
        cache: Folder of this node for blocks; None: blocks are not stored, and each read is a request.
    """

    def __init__(self, address: BucketPath, cache: Path | None) -> None:
        self.name = address
        try:
            self._object: BucketSource | CachedObject = (
                BucketSource(address) if cache is None else CachedObject(address, cache)
            )
        except DamagedError as error:
            raise DataError(f"{address} does not exist, or was deleted; check it with: {listing(address)}") from error
        except OSError as error:
            what = f"data.cache_dir: {cache} cannot hold blocks of {address}: {error.strerror}"
            raise DataError(f"{what}; name a folder on a disk of this node") from error
        self.num_bytes = self._object.num_bytes

    @property
    def tag(self) -> str:
        """The service's identity of the content."""
        return self._object.tag

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes into a view; see `DataFile.read`."""
        try:
            return self._object.read(view, start)
        except DamagedError as error:
            way_out = "bring the object back as it was, or begin anew: train with checkpoint.allow_drift=['data']"
            way_out += ", data prepare with --restart"
            raise DataError(f"{self.name} has changed while it is read: {error.reason}; {way_out}") from error

    def version(self) -> object:
        """See `DataFile`: an object never changes in place."""
        return self.tag

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Call a function that reads ahead; see `DataFile.ahead`."""
        if isinstance(self._object, CachedObject):
            self._object.ahead(read, *args)


class _RemoteStream(io.RawIOBase):
    def __init__(self, file: DataFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_CUR: self._position, os.SEEK_END: self._file.num_bytes}.get(whence, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = self._file.read(memoryview(buffer).cast("B"), self._position)
        self._position += length
        return length


def open_stream(path: Location, buffer_bytes: int = STREAM_BYTES) -> BinaryIO:
    """Open a file that is read once, mostly in order. Blocks of a bucket are not stored on this node.

    Args:
        buffer_bytes: Least bytes of a request to a bucket.
    """
    if isinstance(path, BucketPath):
        return io.BufferedReader(_RemoteStream(RemoteFile(path, None)), buffer_bytes)
    return open(open_regular(path), "rb", buffering=0)


def open_file(path: Location, cache: Path | None) -> LocalFile | RemoteFile:
    """Open a file.

    Args:
        cache: Folder of this node for blocks of buckets; None: blocks are not stored.
    """
    if isinstance(path, BucketPath):
        return RemoteFile(path, cache)
    try:
        return LocalFile(path)
    except OSError as error:
        raise unreadable(f"{path}", error) from error


def read_exactly(file: DataFile, size: int, start: int) -> memoryview:
    """Bytes of a file from an offset on; fewer only where the file ends."""
    content, done = memoryview(bytearray(size)), 0
    while done < size:
        length = file.read(content[done:], start + done)
        if not length:
            break
        done += length
    return content[:done]


def shards(path: Location) -> list[Location]:
    """Files of a prepared corpus: the file itself, or the files of a folder or a prefix, in order."""
    if isinstance(path, Path):
        if not path.is_dir():
            return [path]
        return [*sorted(path.glob(f"*{SHARD_ENDING}"))]
    names = sorted(name for name in BucketStore(path).sizes() if name.endswith(SHARD_ENDING) and "/" not in name)
    return [path / name for name in names] or [path]


def summary_of(path: Location) -> Location:
    """Path of the summary that a preparation writes next to its folder of shards."""
    if isinstance(path, Path):
        return path.with_suffix(".summary.json")
    return BucketPath(path.removesuffix(path.name) + PurePosixPath(path.name).with_suffix(".summary.json").name)


def cache_folder(config: Any) -> Path:
    """Folder of this node for blocks of buckets, `data.cache_dir`."""
    values = {"host": host_name(), "user": getpass.getuser()}
    return Path(fill("data.cache_dir", str(config.cache_dir), values)).expanduser().absolute()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: the file gets its name once it is complete and on disk."""
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path, durable=True, shared=True) as draft, draft.open("wb") as file:
            yield file


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Translate a failed write within this context into an error of nxtrain."""
    try:
        yield
    except OSError as error:
        raise refused(error, f"{path} cannot be written") from error


def unreadable(what: str, error: OSError) -> NxtrainError:
    """Make the error for a failed read: DataError for a wrong name or missing rights, StorageError for the storage."""
    mistakes = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError
    if isinstance(error, mistakes):
        return DataError(f"{what} cannot be read: {error.strerror}")
    return StorageError(f"{what} cannot be read: {error.strerror}. Start again when the storage is back")
