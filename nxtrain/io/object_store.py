"""Where checkpoints lie beside this node's disk: addresses in S3 that are read like paths, and what fills a mirror.

A file is in a mirror whole or not at all: S3 shows no other, and in a folder it gets its name when it was read back.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from nxtrain.errors import CheckpointError, DamagedError, StorageError
from nxtrain.io.atomic import sync_folder, write_durably
from nxtrain.io.checksummed_file import BlockReader, BlockWriter, FileSource, Source, Stored, verify
from nxtrain.io.paths import local_path
from nxtrain.io.regular import read_bytes
from nxtrain.io.s3 import SCHEME, explained, is_missing, open_client, split
from nxtrain.io.transfer_progress import arrived

_CHECKSUM = {"ChecksumAlgorithm": "CRC32"}
"""S3 computes it of what arrives, and refuses what is something else."""
_MAX_PARTS = 10_000
"""Of one upload, by S3's rules."""
_DELETE = 1000
"""Names of one request, by S3's rules."""
_PIECE_BYTES = 1 << 16
"""Of an answer, received at once."""
_ATTEMPTS = 3
"""To read a range, since an answer that breaks off is not asked for again by boto3."""


class S3Path(str):
    """An address in S3, with what is needed of a path; `s3://bucket/prefix/name`."""

    _client: Any = None

    def __truediv__(self, name: str) -> S3Path:
        inner = S3Path(f"{self.rstrip('/')}/{name}")
        inner._client = self._client
        return inner

    def __reduce__(self) -> tuple[type[S3Path], tuple[str]]:
        """How it travels to other ranks, each of which opens a client of its own."""
        return S3Path, (str(self),)

    @property
    def name(self) -> str:
        """The last part."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def client(self) -> Any:
        """Opened when it is first asked for."""
        if self._client is None:
            self._client = open_client(self)
        return self._client

    @property
    def object(self) -> dict[str, str]:
        """What requests call it."""
        return dict(zip(("Bucket", "Key"), split(self), strict=True))

    def read_bytes(self) -> bytes:
        """All of it."""
        with explained(self):
            try:
                return bytes(self.client.get_object(**self.object)["Body"].read())
            except self.client.exceptions.ClientError as error:
                if is_missing(error):
                    raise FileNotFoundError(2, "there is no such object", str(self)) from error
                raise

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            return S3Source(self).num_bytes >= 0
        except DamagedError:
            return False


Place = Path | S3Path
"""Where a file or a folder lies."""


def place_of(text: str) -> Place:
    """The place that an address or a path means."""
    return S3Path(text.rstrip("/")) if text.startswith(SCHEME) else local_path(text)


def content_of(place: Place) -> bytes:
    """All bytes of a small file.

    Raises:
        OSError: It is absent, no regular file, or cannot be read.
    """
    return read_bytes(place) if isinstance(place, Path) else place.read_bytes()


def open_source(place: Place) -> Source:
    """The bytes of a file.

    Raises:
        DamagedError: It is absent.
    """
    return FileSource(place) if isinstance(place, Path) else S3Source(place)


class S3Source:
    """An object, read by ranges.

    Args:
        address: Of the object.

    Raises:
        DamagedError: It is absent.
    """

    def __init__(self, address: S3Path) -> None:
        self.name = address
        with explained(address):
            try:
                self.num_bytes = int(address.client.head_object(**address.object)["ContentLength"])
            except address.client.exceptions.ClientError as error:
                if is_missing(error):
                    raise DamagedError(address, "it is absent") from error
                raise

    def read(self, view: memoryview, start: int) -> int:
        """See `Source`."""
        stop = min(start + len(view), self.num_bytes)
        if start >= stop:
            return 0
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with explained(self.name):
                    answer = self.name.client.get_object(**self.name.object, Range=f"bytes={start}-{stop - 1}")
                    return _receive(answer["Body"], view[: stop - start])
            except StorageError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """See `Source`."""


class Store(Protocol):
    """A folder or a prefix that is filled; names are relative, such as `step-00000100/meta.json`."""

    @property
    def root(self) -> Place:
        """Where it is."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by name."""

    def put(self, name: str, content: bytes) -> None:
        """Add a small file, or replace it."""

    def upload(self, name: str, file: Path, stored: Stored) -> None:
        """Add a file of this node's disk, every block of which is verified as it is read; or replace it.

        Raises:
            DamagedError: It is no longer what was written, or what arrived is something else.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""


def open_store(address: str) -> Store:
    """The store at `s3://bucket/prefix`, or a folder.

    Raises:
        ConfigError: The address names no bucket.
        BackendError: boto3 is not installed, or finds no region, endpoint or profile to work with.
    """
    place = place_of(address)
    return FolderStore(place) if isinstance(place, Path) else S3Store(place)


class FolderStore:
    """A folder that nodes share.

    Args:
        root: The folder; made when something is put there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def sizes(self) -> dict[str, int]:
        """See `Store`."""
        files = [path for path in self.root.glob("*/*") if path.is_file()]
        return {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}

    def put(self, name: str, content: bytes) -> None:
        """See `Store`."""
        self._add(name, lambda draft: _write(draft, content))

    def upload(self, name: str, file: Path, stored: Stored) -> None:
        """See `Store`."""

        def copy(draft: Path) -> None:
            with BlockReader(file, stored) as reader, BlockWriter(draft) as writer:
                for _, content in reader.blocks(range(len(stored.checksums))):
                    writer.write(content)
                writer.close()
            verify(draft, stored)

        self._add(name, copy)

    def delete(self, names: Iterable[str]) -> None:
        """See `Store`."""
        for path in [self.root / name for name in names]:
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def _add(self, name: str, write: Callable[[Path], None]) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
        try:
            write(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)


class S3Store:
    """A prefix of a bucket.

    Args:
        root: Its address.
    """

    def __init__(self, root: S3Path) -> None:
        self.root = root
        self._client = root.client
        self._bucket, prefix = split(root)
        self._prefix = f"{prefix}/" if prefix else ""

    def sizes(self) -> dict[str, int]:
        """See `Store`."""
        with explained(self.root):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            found = [item for page in pages for item in page.get("Contents", ())]
        return {item["Key"].removeprefix(self._prefix): item["Size"] for item in found}

    def put(self, name: str, content: bytes) -> None:
        """See `Store`."""
        with explained(self.root):
            self._client.put_object(**(self.root / name).object, Body=content, **_CHECKSUM)

    def upload(self, name: str, file: Path, stored: Stored) -> None:
        """See `Store`."""
        from boto3.s3.transfer import TransferConfig

        # Each part is a block or more, so that only what is underway is in memory.
        part = stored.block_bytes * max(1, -(-len(stored.checksums) // _MAX_PARTS))
        settings = TransferConfig(multipart_threshold=part, multipart_chunksize=part, max_concurrency=2)
        target = self.root / name
        bucket, key = split(target)
        with BlockReader(file, stored) as reader, explained(self.root):
            body = _Stream(reader.blocks(range(len(stored.checksums))))
            self._client.upload_fileobj(body, bucket, key, ExtraArgs=_CHECKSUM, Config=settings, Callback=arrived.note)
        if (found := S3Source(target).num_bytes) != stored.num_bytes:
            raise DamagedError(target, f"it has {found:,} bytes instead of {stored.num_bytes:,}")

    def delete(self, names: Iterable[str]) -> None:
        """See `Store`."""
        keys = [{"Key": self._prefix + name} for name in names]
        with explained(self.root):
            for first in range(0, len(keys), _DELETE):
                batch = {"Objects": keys[first : first + _DELETE], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=batch)
                for failed in answer.get("Errors", ()):
                    raise CheckpointError(f"{self.root}: cannot delete {failed['Key']}: {failed['Message']}")


class _Stream(io.RawIOBase):
    """The verified blocks of a file, one after the other, as boto3 wants them."""

    def __init__(self, blocks: Iterator[tuple[int, memoryview]]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Exactly so many bytes, but for the last."""
        wanted, found = size if size is not None and size >= 0 else 1 << 62, bytearray()
        while len(found) < wanted:
            if not self._rest:
                _, self._rest = next(self._blocks, (0, memoryview(b"")))
                if not self._rest:
                    break
            taken = self._rest[: wanted - len(found)]
            found += taken
            self._rest = self._rest[len(taken) :]
        return bytes(found)


def _receive(body: Any, view: memoryview) -> int:
    """Fill memory from an answer, in pieces so small that a slow one is seen to come; it raises if it breaks off."""
    received = 0
    while piece := body.read(min(_PIECE_BYTES, len(view) - received)):
        view[received : received + len(piece)] = piece
        received += len(piece)
        arrived.note(len(piece))
    return received


def _write(path: Path, content: bytes) -> None:
    write_durably(path, lambda file: file.write_bytes(content))
    if path.read_bytes() != content:
        raise DamagedError(path, "it is not what was written")
