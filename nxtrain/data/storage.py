"""Files of corpora on disks and in object storage, read at any offset, and atomic writes of prepared files.

Files are opened once, and a read looks up no name. Files on a disk are read instead of mapped. A lost page of a mapped
file would end the process by a signal, without a message.
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
"""Bytes per request for an object that is read once. A request takes tens of milliseconds, whatever its size."""


class DataFile(Protocol):
    """An open file of a corpus, on a disk or in object storage."""

    @property
    def name(self) -> Location:
        """Path or address of the file."""

    @property
    def num_bytes(self) -> int:
        """Length of the file in bytes when it was opened."""

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes from offset `start` into `view`, perhaps fewer than fit; return their number, 0 at the end.

        Raises:
            OSError: The storage fails.
            DataError: The file was deleted or replaced.
        """

    def version(self) -> object:
        """Value that changes when the content of the file is modified in place."""

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Prefetch from object storage by calling a reading function in another thread; do nothing for a disk."""


class LocalFile:
    """An open file on a disk."""

    def __init__(self, path: Path) -> None:
        self.name = path
        self._file = open_regular(path)
        weakref.finalize(self, os.close, self._file)
        self.num_bytes = os.fstat(self._file).st_size

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes into a view; see `DataFile.read`."""
        return os.preadv(self._file, [view], start)

    def version(self) -> object:
        """Value that changes when the content of the file is modified in place."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Do nothing, since the operating system reads ahead."""


class RemoteFile:
    """An object in object storage, whose bytes are fetched when they are read.

    Args:
        cache: Folder on this node's disk that caches fetched blocks; None for a request at each read.
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
        """Version tag of the object's content, from the storage service."""
        return self._object.tag

    def read(self, view: memoryview, start: int) -> int:
        """Read bytes into a view; see `DataFile.read`."""
        try:
            return self._object.read(view, start)
        except DamagedError as error:
            way_out = "restore the object, or begin again: train with checkpoint.allow_drift=['data']"
            way_out += ", data prepare with --restart"
            raise DataError(f"{self.name} has changed while it is read: {error.reason}; {way_out}") from error

    def version(self) -> object:
        """Version tag, which never changes, since an object cannot be modified in place."""
        return self.tag

    def ahead(self, read: Callable[..., object], *args: object) -> None:
        """Prefetch: call a reading function in another thread; see `DataFile.ahead`."""
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
    """Open a file for reading once, mostly in order. Blocks from object storage are not cached on this node.

    Args:
        buffer_bytes: Minimum bytes of a request to object storage.
    """
    if isinstance(path, BucketPath):
        return io.BufferedReader(_RemoteStream(RemoteFile(path, None)), buffer_bytes)
    return open(open_regular(path), "rb", buffering=0)


def open_file(path: Location, cache: Path | None) -> LocalFile | RemoteFile:
    """Open a file on a disk or in object storage for reading at any offset.

    Args:
        cache: Folder on this node's disk that caches blocks from object storage; None for no cache.
    """
    if isinstance(path, BucketPath):
        return RemoteFile(path, cache)
    try:
        return LocalFile(path)
    except OSError as error:
        raise unreadable(f"{path}", error) from error


def read_exactly(file: DataFile, size: int, start: int) -> memoryview:
    """Read `size` bytes of a file from offset `start`; fewer only at the end of the file."""
    content, done = memoryview(bytearray(size)), 0
    while done < size:
        length = file.read(content[done:], start + done)
        if not length:
            break
        done += length
    return content[:done]


def shards(path: Location) -> list[Location]:
    """Files of a prepared corpus: the file itself, or the files of a folder or bucket prefix, in order."""
    if isinstance(path, Path):
        if not path.is_dir():
            return [path]
        return [*sorted(path.glob(f"*{SHARD_ENDING}"))]
    names = sorted(name for name in BucketStore(path).sizes() if name.endswith(SHARD_ENDING) and "/" not in name)
    return [path / name for name in names] or [path]


def summary_of(path: Location) -> Location:
    """Path of the summary file that a preparation writes next to the corpus."""
    if isinstance(path, Path):
        return path.with_suffix(".summary.json")
    return BucketPath(path.removesuffix(path.name) + PurePosixPath(path.name).with_suffix(".summary.json").name)


def cache_folder(config: Any) -> Path:
    """Folder on this node's disk that caches blocks from object storage, from `data.cache_dir`."""
    values = {"host": host_name(), "user": getpass.getuser()}
    return Path(fill("data.cache_dir", str(config.cache_dir), values)).expanduser().absolute()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context that writes a file atomically: the file gets its name once it is complete and synced to the disk."""
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path, durable=True, shared=True) as draft, draft.open("wb") as file:
            yield file


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Context that translates a failed write into an error of nxtrain."""
    try:
        yield
    except OSError as error:
        raise refused(error, f"{path} cannot be written") from error


def unreadable(what: str, error: OSError) -> NxtrainError:
    """Error for a failed read: DataError for a wrong name or missing permissions, StorageError for failing storage."""
    mistakes = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError
    if isinstance(error, mistakes):
        return DataError(f"{what} cannot be read: {error.strerror}")
    return StorageError(f"{what} cannot be read: {error.strerror}. Start again when the storage is back")
