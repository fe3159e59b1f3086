"""Addresses in object storage, `s3://`, `gs://` and `az://`, and the requests that every service answers.

Services are `nxtrain.common.io.s3`, `gcs` and `azure_blob`. Each imports its vendor's client at the first request.
"""

from __future__ import annotations

import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nxtrain.common.errors import BackendError, ConfigError, DamagedError, StorageError
from nxtrain.common.io.checksummed_file import ChecksummedReader, FileDigest, transferred
from nxtrain.common.io.paths import listing, scheme_of

_SERVICES = {
    "s3": "nxtrain.common.io.s3:S3",
    "gs": "nxtrain.common.io.gcs:CloudStorage",
    "az": "nxtrain.common.io.azure_blob:BlobStorage",
}
"""Class of each scheme: Amazon S3, Google Cloud Storage, Azure Blob Storage."""

PIECE_BYTES = 1 << 16
"""Bytes of a response that are received at once, so that progress of a slow transfer is counted."""

Cause = Literal["absent", "replaced", "passing", "refused"]
"""Reason of a failed request.

No such object; another version than the request names; a failure of the server or the network, after which the same
request may succeed; or a request that never will.
"""


class Stat(NamedTuple):
    """Length of an object, and the service's identity of its content."""

    num_bytes: int
    tag: str


class BucketPath(str):
    """An address in object storage, `s3://bucket/prefix/name`, with the methods of `Path` that are needed."""

    _service: BucketService | None = None

    def __truediv__(self, name: str) -> BucketPath:
        inner = BucketPath(f"{self.rstrip('/')}/{name}")
        inner._service = self._service
        return inner

    def __reduce__(self) -> tuple[type[BucketPath], tuple[str]]:
        """Pickled form, without the client, since each rank opens a client."""
        return BucketPath, (str(self),)

    @property
    def name(self) -> str:
        """Last component of the address."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def bucket(self) -> str:
        """Name of the bucket, which Azure calls a container."""
        bucket = self.partition("://")[2].partition("/")[0]
        if not bucket:
            raise ConfigError(f"{self} names no bucket; write {scheme_of(self)}://BUCKET/PREFIX")
        return bucket

    @property
    def key(self) -> str:
        """Name of the object or the prefix in its bucket; may be empty."""
        return self.partition("://")[2].partition("/")[2].strip("/")

    @property
    def service(self) -> BucketService:
        """Client of the service, opened at the first use."""
        if self._service is None:
            module, _, name = _SERVICES[scheme_of(self)].partition(":")
            self._service = getattr(import_module(module), name)(self)
        return self._service

    def read_bytes(self) -> bytes:
        """Whole content."""
        with self.service.explained(self, reads_object=True):
            return self.service.read(self.key)

    def is_file(self) -> bool:
        """True if the object exists."""
        try:
            return self.stat().num_bytes >= 0
        except FileNotFoundError:
            return False

    def stat(self) -> Stat:
        """Length and tag of the object."""
        with self.service.explained(self, reads_object=True):
            return self.service.stat(self.key)


class BucketService(ABC):
    """Requests to a bucket. Methods raise the errors of the vendor's client, which `explained` translates.

    Attributes:
        extra: Extra of nxtrain that installs the client.
    """

    extra: str

    def __init__(self, address: BucketPath) -> None:
        self.bucket = address.bucket
        try:
            self.errors = self.vendor_errors()
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            way_out = f"pip install 'nxtrain[{self.extra}]'"
            raise BackendError(f"{address} needs {missing}, which is not installed: {way_out}") from error
        with self.explained(address):
            self.open(address)

    @abstractmethod
    def vendor_errors(self) -> tuple[type[Exception], ...]:
        """Import the vendor's client, and return the classes of its errors."""

    @abstractmethod
    def open(self, address: str) -> None:
        """Open the client, with the settings that the vendor's own tools read."""

    @abstractmethod
    def cause(self, error: Any) -> Cause:
        """Classify an error of the vendor's client."""

    @abstractmethod
    def stat(self, key: str) -> Stat:
        """Length and tag of an object."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Whole content of an object."""

    @abstractmethod
    def read_range(self, key: str, tag: str, view: memoryview, start: int) -> int:
        """Read bytes of the version with a tag, from `start` on, into a view; return their number."""

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Length of every object whose key begins with a prefix, by key."""

    @abstractmethod
    def put(self, key: str, content: bytes) -> None:
        """Write a small object, or replace it; the service verifies a checksum."""

    @abstractmethod
    def upload(self, key: str, content: VerifiedStream, stored: FileDigest) -> None:
        """Write a large object in parts, or replace it; the service verifies checksums of what arrives."""

    @abstractmethod
    def download(self, key: str, target: Path) -> None:
        """Write the content of an object into a file."""

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Delete objects; absent ones are not an error."""

    @contextmanager
    def explained(self, address: str, *, reads_object: bool = False) -> Iterator[None]:
        """Translate the vendor's errors within this context into errors of nxtrain.

        Args:
            reads_object: The request needs an object; for others, the bucket is absent.

        Raises:
            FileNotFoundError: There is no such object.
            DamagedError: The object has been replaced.
            StorageError: The service does not answer as it should.
            BackendError: The service refuses the request.
        """
        try:
            yield
        except self.errors as error:
            cause = self.cause(error)
            if cause == "absent" and reads_object:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", str(address)) from error
            if cause == "replaced":
                raise DamagedError(address, "another version has taken its place since it was opened") from error
            if cause == "passing":
                way_out = "the storage does not answer as it should, start again when it does"
                raise StorageError(f"{address}: {error}; {way_out}") from error
            hint = "check the bucket's name, and your access with"
            bucket = f"{scheme_of(address)}://{self.bucket}/"
            raise BackendError(f"{address}: {error}; {hint}: {listing(bucket)}") from error


class VerifiedStream(io.RawIOBase):
    """Readable stream of a file's verified blocks, for a vendor's client.

    The stream says that seeking is impossible, so that clients read in order and hold a part in memory. Google's client
    seeks all the same, when the server has lost a part.
    """

    def __init__(self, reader: ChecksummedReader, stored: FileDigest) -> None:
        self._reader, self._stored = reader, stored
        self._position = 0
        self.seek(0)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_CUR: self._position, os.SEEK_END: self._stored.num_bytes}.get(whence, 0)
        first, skipped = divmod(self._position, self._stored.block_bytes)
        self._blocks = self._reader.blocks(range(first, len(self._stored.xxh3)))
        self._rest = memoryview(b"")
        if skipped:
            self._rest = next(self._blocks)[1][skipped:]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read exactly `size` bytes, fewer only at the end."""
        if size is None or size < 0:
            size = 1 << 62
        content = bytearray()
        while len(content) < size:
            if not self._rest:
                _, self._rest = next(self._blocks, (0, memoryview(b"")))
                if not self._rest:
                    break
            taken = self._rest[: size - len(content)]
            content += taken
            self._rest = self._rest[len(taken) :]
        self._position += len(content)
        return bytes(content)


def receive(pieces: Iterable[bytes], view: memoryview) -> int:
    """Fill a view with the pieces of a response, and count them as progress."""
    received = 0
    for piece in pieces:
        view[received : received + len(piece)] = piece
        received += len(piece)
        transferred.note(len(piece))
    return received
