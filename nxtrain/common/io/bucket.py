"""Object storage addresses `s3://`, `gs://` and `az://`, and the interface of the clients for these services.

The clients are `nxtrain.common.io.s3`, `gcs` and `azure_blob`. Each imports its vendor's library at the first request.
"""

from __future__ import annotations

import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from nxtrain.common.errors import BackendError, ConfigError, DamagedError, StorageError
from nxtrain.common.io.checksummed_file import ChecksummedReader, FileDigest, transferred
from nxtrain.common.io.paths import listing, scheme_of

T = TypeVar("T")

_SERVICES = {
    "s3": "nxtrain.common.io.s3:S3",
    "gs": "nxtrain.common.io.gcs:CloudStorage",
    "az": "nxtrain.common.io.azure_blob:BlobStorage",
}
"""Client class of each address scheme: Amazon S3, Google Cloud Storage, Azure Blob Storage."""

PIECE_BYTES = 1 << 16
"""Bytes of a response received at once. Progress of a slow transfer is counted after each piece."""

_ATTEMPTS = 3
"""Number of attempts of a request that reads, since vendor clients do not retry a response that breaks off."""

Cause = Literal["absent", "replaced", "passing", "refused"]
"""Reason of a failed storage request.

- `absent`: there is no such object.
- `replaced`: the object has another version than the request asks for.
- `passing`: the server or the network failed, so the same request may succeed later.
- `refused`: the same request will never succeed.
"""


class Stat(NamedTuple):
    """Length of an object in bytes, and the service's version tag of its content."""

    num_bytes: int
    tag: str


class BucketPath(str):
    """An address in object storage, `s3://bucket/prefix/name`, with the `pathlib.Path` methods that nxtrain needs."""

    _service: BucketService | None = None

    def __truediv__(self, name: str) -> BucketPath:
        inner = BucketPath(f"{self.rstrip('/')}/{name}")
        inner._service = self._service
        return inner

    def __reduce__(self) -> tuple[type[BucketPath], tuple[str]]:
        """Pickle support without the client, since each rank opens its own client."""
        return BucketPath, (str(self),)

    @property
    def name(self) -> str:
        """Last component of the address."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def bucket(self) -> str:
        """Name of the bucket (Azure: container)."""
        bucket = self.partition("://")[2].partition("/")[0]
        if not bucket:
            raise ConfigError(f"{self} names no bucket; write {scheme_of(self)}://BUCKET/PREFIX")
        return bucket

    @property
    def key(self) -> str:
        """Key of the object or prefix inside its bucket; may be empty."""
        return self.partition("://")[2].partition("/")[2].strip("/")

    @property
    def service(self) -> BucketService:
        """Client of the storage service, opened at the first use."""
        if self._service is None:
            module, _, name = _SERVICES[scheme_of(self)].partition(":")
            self._service = getattr(import_module(module), name)(self)
        return self._service

    def read_bytes(self) -> bytes:
        """Read the whole content of the object."""

        def request() -> bytes:
            with self.service.explained(self, reads_object=True):
                return self.service.read(self.key)

        return repeated(request)

    def is_file(self) -> bool:
        """True if the object exists."""
        try:
            return self.stat().num_bytes >= 0
        except FileNotFoundError:
            return False

    def stat(self) -> Stat:
        """Length and version tag of the object."""
        with self.service.explained(self, reads_object=True):
            return self.service.stat(self.key)


class BucketService(ABC):
    """Client of one bucket. Methods raise the errors of the vendor's library, which `explained` translates.

    Attributes:
        extra: Extra of the nxtrain package that installs the vendor's library.
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
        """Import the vendor's library, and return its error classes."""

    @abstractmethod
    def open(self, address: str) -> None:
        """Open the vendor's client, with the settings that the vendor's own command line tools read."""

    @abstractmethod
    def cause(self, error: Any) -> Cause:
        """Classify an error of the vendor's library."""

    @abstractmethod
    def stat(self, key: str) -> Stat:
        """Length and version tag of an object."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Read the whole content of an object."""

    @abstractmethod
    def read_range(self, key: str, tag: str, view: memoryview, start: int) -> int:
        """Read bytes from offset `start` into a view, if the object still has version `tag`; return their number."""

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Length in bytes of every object whose key begins with `prefix`, by key."""

    @abstractmethod
    def put(self, key: str, content: bytes) -> None:
        """Write a small object, creating or replacing it; the service verifies a checksum."""

    @abstractmethod
    def upload(self, key: str, content: VerifiedStream, stored: FileDigest) -> None:
        """Write a large object in parts, creating or replacing it; the service verifies checksums."""

    @abstractmethod
    def download(self, key: str, target: Path) -> None:
        """Download an object into a file."""

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Delete objects; an absent object is not an error."""

    @contextmanager
    def explained(self, address: str, *, reads_object: bool = False) -> Iterator[None]:
        """Context that translates errors of the vendor's library into errors of nxtrain.

        Args:
            reads_object: The request reads an object. For other requests, an `absent` error means that the bucket is
                absent.

        Raises:
            FileNotFoundError: There is no such object.
            DamagedError: The object has been replaced.
            StorageError: The service or the network failed.
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
                way_out = "the storage service does not respond properly, start again when it does"
                raise StorageError(f"{address}: {error}; {way_out}") from error
            hint = "check the bucket's name, and your access with"
            bucket = f"{scheme_of(address)}://{self.bucket}/"
            raise BackendError(f"{address}: {error}; {hint}: {listing(bucket)}") from error


class VerifiedStream(io.RawIOBase):
    """Readable stream of a file's checksummed blocks, passed to a vendor's upload function.

    The stream declares itself unseekable, so that clients read in order and hold one part in memory. Google's client
    still seeks if the server has lost a part.
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
        """Read exactly `size` verified bytes of the file, fewer only at its end."""
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


def repeated(request: Callable[[], T]) -> T:
    """Make a request that reads, and repeat it after a failure that may pass."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(StorageError):
            return request()
    return request()


def receive(pieces: Iterable[bytes], view: memoryview) -> int:
    """Copy the pieces of a response into a view, count them as progress, and return the number of bytes."""
    received = 0
    for piece in pieces:
        view[received : received + len(piece)] = piece
        received += len(piece)
        transferred.note(len(piece))
    return received
