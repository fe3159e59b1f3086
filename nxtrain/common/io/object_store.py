"""Storage other than this node's disk: S3 addresses that are read like paths, and stores of files.

A store holds a file completely or not at all. S3 shows complete objects only. In a folder, a file gets its name after
the file was read back and verified.
"""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from nxtrain.common.errors import CheckpointError, DamagedError, StorageError
from nxtrain.common.io.atomic import replacing, write_durably
from nxtrain.common.io.checksummed_file import (
    ByteSource,
    ChecksummedReader,
    ChecksummedWriter,
    FileDigest,
    FileSource,
    transferred,
    verify,
)
from nxtrain.common.io.paths import storage_path
from nxtrain.common.io.regular import read_bytes, require_regular
from nxtrain.common.io.s3 import SCHEME, explained, is_missing, is_replaced, open_client, split

_CHECKSUM = {"ChecksumAlgorithm": "CRC32"}
"""Checksum of uploads: S3 recomputes it from the received bytes, and refuses a mismatch."""
_MAX_PARTS = 10_000
"""Most parts of one upload, by S3's rules."""
_DELETE = 1000
"""Most names of one delete request, by S3's rules."""
_PIECE_BYTES = 1 << 16
"""Bytes of a response that are received at once."""
_ATTEMPTS = 3
"""Tries to read a range, since boto3 does not retry a response that breaks off."""


class S3Path(str):
    """An address in S3, `s3://bucket/prefix/name`, with the methods of `Path` that are needed."""

    _client: Any = None

    def __truediv__(self, name: str) -> S3Path:
        inner = S3Path(f"{self.rstrip('/')}/{name}")
        inner._client = self._client
        return inner

    def __reduce__(self) -> tuple[type[S3Path], tuple[str]]:
        """Pickled form, without the client, since each rank opens a client."""
        return S3Path, (str(self),)

    @property
    def name(self) -> str:
        """Last component of the address."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def client(self) -> Any:
        """Client of boto3, opened at the first use."""
        if self._client is None:
            self._client = open_client(self)
        return self._client

    @property
    def object(self) -> dict[str, str]:
        """Bucket and key, as arguments of requests."""
        return dict(zip(("Bucket", "Key"), split(self), strict=True))

    def read_bytes(self) -> bytes:
        """Whole content."""
        with explained(self), _absent_as_such(self):
            return bytes(self.client.get_object(**self.object)["Body"].read())

    def is_file(self) -> bool:
        """True if the object exists."""
        try:
            return S3Source(self).num_bytes >= 0
        except DamagedError:
            return False


Location = Path | S3Path
"""Path or S3 address of a file or a folder."""


def place_of(text: str) -> Location:
    """Location of an address in S3 or a path."""
    if text.startswith(SCHEME):
        return S3Path(SCHEME + text.removeprefix(SCHEME).rstrip("/"))
    return storage_path(text)


def content_of(file: Location) -> bytes:
    """Whole content of a small file."""
    if isinstance(file, Path):
        return read_bytes(file)
    return file.read_bytes()


def open_source(file: Location) -> ByteSource:
    """Open a file for reading."""
    if isinstance(file, Path):
        return FileSource(file)
    return S3Source(file)


class S3Source:
    """An object of S3, read by ranges of one version; `tag` is S3's identity of the object's content."""

    def __init__(self, address: S3Path) -> None:
        self.name = address
        try:
            with explained(address), _absent_as_such(address):
                head = address.client.head_object(**address.object)
        except FileNotFoundError as error:
            raise DamagedError(address, "it is absent") from error
        self.num_bytes, self.tag = int(head["ContentLength"]), str(head["ETag"])

    def read(self, view: memoryview, start: int) -> int:
        stop = min(start + len(view), self.num_bytes)
        if start >= stop:
            return 0
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with explained(self.name), _change_as_damage(self.name):
                    wanted = {"Range": f"bytes={start}-{stop - 1}", "IfMatch": self.tag}
                    answer = self.name.client.get_object(**self.name.object, **wanted)
                    return _receive(answer["Body"], view[: stop - start])
            except StorageError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Close the connection."""


class ObjectStore(Protocol):
    """A writable folder or S3 prefix; file names are relative, such as `step-00000100/meta.json`."""

    @property
    def root(self) -> Location:
        """The folder or prefix."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Length of every file of the store or of a folder, by name."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, or replace it."""

    def upload(self, name: str, file: Path, stored: FileDigest) -> None:
        """Upload a file of this node's disk, or replace it; each read block is verified.

        Raises:
            DamagedError: The file, or the uploaded copy, differs from the digest.
        """

    def download(self, name: str, target: Path) -> None:
        """Copy a file to this node's disk; the content is not verified.

        Raises:
            FileNotFoundError: The store has no such file.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""


def open_store(address: str) -> ObjectStore:
    """The store at `s3://bucket/prefix`, or a folder."""
    root = place_of(address)
    if isinstance(root, Path):
        return FolderStore(root)
    return S3Store(root)


class FolderStore:
    """A folder that nodes share, made at the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def sizes(self, folder: str = "") -> dict[str, int]:
        # Checkpoints lie one folder deep; other folders of a shared disk, which may be large, are not walked.
        pattern = "*/*"
        if folder:
            pattern = f"{folder}/**/*"
        files = [path for path in self.root.glob(pattern) if path.is_file()]
        return {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}

    def put(self, name: str, content: bytes) -> None:
        with self._draft(name) as draft:
            _write(draft, content)

    def upload(self, name: str, file: Path, stored: FileDigest) -> None:
        with self._draft(name) as draft:
            with ChecksummedReader(file, stored) as reader, ChecksummedWriter(draft) as writer:
                for _, content in reader.blocks(range(len(stored.xxh3))):
                    writer.write(content)
                writer.close()
            verify(draft, stored)

    def download(self, name: str, target: Path) -> None:
        require_regular(self.root / name)
        shutil.copyfile(self.root / name, target)

    def delete(self, names: Iterable[str]) -> None:
        for path in [self.root / name for name in names]:
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _draft(self, name: str) -> AbstractContextManager[Path]:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return replacing(path, durable=True, shared=True)


class S3Store:
    """A prefix of an S3 bucket."""

    def __init__(self, root: S3Path) -> None:
        self.root = root
        self._client = root.client
        self._bucket, prefix = split(root)
        self._prefix = ""
        if prefix:
            self._prefix = f"{prefix}/"

    def sizes(self, folder: str = "") -> dict[str, int]:
        prefix = self._prefix
        if folder:
            prefix = f"{self._prefix}{folder}/"
        sizes: dict[str, int] = {}
        with explained(self.root):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                for item in page.get("Contents", ()):
                    sizes[item["Key"].removeprefix(self._prefix)] = item["Size"]
        return sizes

    def put(self, name: str, content: bytes) -> None:
        with explained(self.root):
            self._client.put_object(**(self.root / name).object, Body=content, **_CHECKSUM)

    def upload(self, name: str, file: Path, stored: FileDigest) -> None:
        from boto3.s3.transfer import TransferConfig

        # Each part is one or more blocks, so that only the parts in transfer are in memory.
        part = stored.block_bytes * max(1, -(-len(stored.xxh3) // _MAX_PARTS))
        settings = TransferConfig(multipart_threshold=part, multipart_chunksize=part, max_concurrency=2)
        target = self.root / name
        bucket, key = split(target)
        with ChecksummedReader(file, stored) as reader, explained(self.root):
            body = _UploadStream(reader.blocks(range(len(stored.xxh3))))
            self._client.upload_fileobj(
                body, bucket, key, ExtraArgs=_CHECKSUM, Config=settings, Callback=transferred.note
            )
        num_bytes = S3Source(target).num_bytes
        if num_bytes != stored.num_bytes:
            raise DamagedError(target, f"it has {num_bytes:,} bytes instead of {stored.num_bytes:,}")

    def download(self, name: str, target: Path) -> None:
        address = self.root / name
        bucket, key = split(address)
        with explained(self.root), _absent_as_such(address):
            self._client.download_file(bucket, key, str(target), Callback=transferred.note)

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        with explained(self.root):
            for first in range(0, len(keys), _DELETE):
                batch = {"Objects": keys[first : first + _DELETE], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=batch)
                for failed in answer.get("Errors", ()):
                    raise CheckpointError(f"{self.root}: cannot delete {failed['Key']}: {failed['Message']}")


class _UploadStream(io.RawIOBase):
    """Readable stream of a file's verified blocks, for boto3."""

    def __init__(self, blocks: Iterator[tuple[int, memoryview]]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

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
        return bytes(content)


@contextmanager
def _absent_as_such(address: S3Path) -> Iterator[None]:
    """Raise FileNotFoundError if S3 answers that the object does not exist."""
    try:
        yield
    except address.client.exceptions.ClientError as error:
        if is_missing(error):
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(address)) from error
        raise


@contextmanager
def _change_as_damage(address: S3Path) -> Iterator[None]:
    """Raise DamagedError for an object that is gone or replaced."""
    try:
        yield
    except address.client.exceptions.ClientError as error:
        if is_missing(error):
            raise DamagedError(address, "it is absent") from error
        if is_replaced(error):
            raise DamagedError(address, "another version has taken its place since it was opened") from error
        raise


def _receive(body: Any, view: memoryview) -> int:
    """Fill `view` from a response, in small pieces, so that progress of a slow transfer is counted."""
    received = 0
    while True:
        piece = body.read(min(_PIECE_BYTES, len(view) - received))
        if not piece:
            return received
        view[received : received + len(piece)] = piece
        received += len(piece)
        transferred.note(len(piece))


def _write(path: Path, content: bytes) -> None:
    write_durably(path, lambda file: file.write_bytes(content))
    if path.read_bytes() != content:
        raise DamagedError(path, "it is not what was written")
