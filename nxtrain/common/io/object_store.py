"""Locations of files on disks or in object storage, and stores of whole files with verified uploads.

A store holds a file completely or not at all. A bucket shows complete objects only. In a folder, a file gets its final
name only after the file was read back and verified.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from nxtrain.common.errors import DamagedError
from nxtrain.common.io.atomic import replacing, write_durably
from nxtrain.common.io.bucket import BucketPath, VerifiedStream, repeated
from nxtrain.common.io.checksummed_file import (
    ByteSource,
    ChecksummedReader,
    ChecksummedWriter,
    FileDigest,
    FileSource,
    verify,
)
from nxtrain.common.io.paths import is_bucket, storage_path
from nxtrain.common.io.regular import read_bytes, require_regular

Location = Path | BucketPath
"""Path on a disk or address in object storage, of a file or a folder."""


def location_of(text: str) -> Location:
    """Parse an object storage address or a path."""
    if is_bucket(text):
        scheme, _, rest = text.partition("://")
        return BucketPath(f"{scheme}://{rest.rstrip('/')}")
    return storage_path(text)


def content_of(file: Location) -> bytes:
    """Read the whole content of a small file on a disk or in object storage."""
    if isinstance(file, Path):
        return read_bytes(file)
    return file.read_bytes()


def open_source(file: Location) -> ByteSource:
    """Open a file on a disk or in object storage for reading."""
    if isinstance(file, Path):
        return FileSource(file)
    return BucketSource(file)


class BucketSource:
    """An object in object storage, read by byte ranges of one version. `tag` is the version tag of the content."""

    def __init__(self, address: BucketPath) -> None:
        self.name = address
        try:
            self.num_bytes, self.tag = address.stat()
        except FileNotFoundError as error:
            raise DamagedError(address, "it is absent") from error

    def read(self, view: memoryview, start: int) -> int:
        stop = min(start + len(view), self.num_bytes)
        if start >= stop:
            return 0
        service = self.name.service

        def request() -> int:
            with service.explained(self.name, reads_object=True):
                return service.read_range(self.name.key, self.tag, view[: stop - start], start)

        try:
            return repeated(request)
        except FileNotFoundError as error:
            raise DamagedError(self.name, "it is absent") from error

    def close(self) -> None:
        """Close the connection."""


class ObjectStore(Protocol):
    """Writable folder or bucket prefix. File names are relative, such as `step-00000100/meta.json`."""

    @property
    def root(self) -> Location:
        """The folder, or the address of the prefix."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Length in bytes of every file of the store or of one of its folders, by name."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, creating or replacing it."""

    def upload(self, name: str, file: Path, stored: FileDigest) -> None:
        """Copy a file of this node's disk into the store, creating or replacing it; each read block is verified.

        Raises:
            DamagedError: The file, or the uploaded copy, does not match the checksums.
        """

    def download(self, name: str, target: Path) -> None:
        """Copy a file of the store to this node's disk, without verification.

        Raises:
            FileNotFoundError: The store has no such file.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete files of the store."""


def open_store(address: str) -> ObjectStore:
    """Open the store at an object storage address, or in a folder."""
    root = location_of(address)
    if isinstance(root, Path):
        return FolderStore(root)
    return BucketStore(root)


class FolderStore:
    """Store in a folder that several nodes share; the folder is created at the first write."""

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
            write_durably(draft, lambda file: file.write_bytes(content))
            if draft.read_bytes() != content:
                raise DamagedError(draft, "its content is not what was written")

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


class BucketStore:
    """Store under a prefix of a bucket."""

    def __init__(self, root: BucketPath) -> None:
        self.root = root
        self._service = root.service
        self._prefix = ""
        if root.key:
            self._prefix = f"{root.key}/"

    def sizes(self, folder: str = "") -> dict[str, int]:
        prefix = self._prefix
        if folder:
            prefix = f"{self._prefix}{folder}/"
        with self._service.explained(self.root):
            sizes = self._service.sizes(prefix)
        return {key.removeprefix(self._prefix): size for key, size in sizes.items()}

    def put(self, name: str, content: bytes) -> None:
        with self._service.explained(self.root):
            self._service.put(self._prefix + name, content)

    def upload(self, name: str, file: Path, stored: FileDigest) -> None:
        with ChecksummedReader(file, stored) as reader, self._service.explained(self.root):
            self._service.upload(self._prefix + name, VerifiedStream(reader, stored), stored)
        target = self.root / name
        num_bytes = BucketSource(target).num_bytes
        if num_bytes != stored.num_bytes:
            raise DamagedError(target, f"it has {num_bytes:,} bytes instead of {stored.num_bytes:,}")

    def download(self, name: str, target: Path) -> None:
        with self._service.explained(self.root / name, reads_object=True):
            self._service.download(self._prefix + name, target)

    def delete(self, names: Iterable[str]) -> None:
        with self._service.explained(self.root):
            self._service.delete([self._prefix + name for name in names])
