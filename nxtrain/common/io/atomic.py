"""Atomic file writes: content goes to a hidden temporary file, the draft, which is renamed once it is complete.

A reader sees either the old or the new content. A killed process leaves a draft file behind, which no reader opens.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nxtrain.common.errors import FULL
from nxtrain.common.io.regular import kind_of

_DRAFT = re.compile(r"\..+\.(draft|[0-9a-f]{32})")


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Context that gives errors of writes the path of the file: errors of a full disk, and errors that name a draft.

    The system names no path when a write fails, but only when a file is opened.
    """
    try:
        yield
    except OSError as error:
        is_full = error.filename is None and error.errno in FULL
        if is_full or (draft is not None and error.filename == str(draft)):
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, *, durable: bool, shared: bool = False) -> Iterator[Path]:
    """Context with the path of a draft file, which replaces `path` at the end, or is deleted after an error.

    A device, a FIFO or a socket at the path is refused, and so is a name such as `/dev/stdout`. The rename would put a
    file in its place.

    Args:
        path: The file to write; its folder must exist.
        durable: Sync the content to the disk before the rename, and the folder after the rename.
        shared: Several processes may write the file at once, so each draft gets a unique name. The draft of a killed
            process then remains. Otherwise the next write overwrites that draft.
    """
    suffix = "draft"
    if shared:
        suffix = uuid.uuid4().hex
    draft = path.with_name(f".{path.name}.{suffix}")
    kind = ""
    with suppress(OSError):  # an absent path is free, and the write reports any other error
        kind = kind_of(os.stat(path).st_mode)
        if path.is_symlink() and os.readlink(path).startswith("/proc/"):
            kind = "the name of an open stream"
    if kind:
        raise FileExistsError(errno.EEXIST, f"it is {kind}, not a file", str(path))
    try:
        with naming(path, draft):
            yield draft
            if durable:
                sync_file(draft)
        draft.replace(path)
    finally:
        with suppress(OSError):  # an error of the write counts more
            draft.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def replace_bytes(path: Path, content: bytes, *, durable: bool, shared: bool = False) -> None:
    """Write bytes to a file atomically, creating or replacing the file; see `replacing`."""
    with replacing(path, durable=durable, shared=shared) as draft:
        draft.write_bytes(content)


def replace_text(path: Path, text: str, *, durable: bool, shared: bool = False) -> None:
    """Write a text in UTF-8 to a file atomically, creating or replacing the file; see `replacing`."""
    replace_bytes(path, text.encode(), durable=durable, shared=shared)


def clear_drafts(folder: Path) -> None:
    """Delete the draft files of killed processes in a folder. No other process may write in the folder meanwhile."""
    for path in folder.glob(".*"):
        if _DRAFT.fullmatch(path.name):
            with suppress(OSError):  # an unwritable folder is reported by the next write
                path.unlink(missing_ok=True)


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file and sync its content to the disk."""
    with naming(path):
        write(path)
        sync_file(path)


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
