"""Seal of an entry: the hashes of its complete files, in a file next to them.

A seal belongs to one compilation of the entry, identified by the time of `model.done`, which the compiler writes last.
An entry compiled again has no seal until it is sealed again. A damaged entry does not match its seal.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nxtrain.common.io.atomic import replace_text
from nxtrain.tools.compile.entries import DONE, NEFF, SEAL, content, is_content

_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Content:
    """Expected content of a file.

    Args:
        size_bytes: Length of the file.
        sha256: SHA-256 of the file, hexadecimal.
    """

    size_bytes: int
    sha256: str


Seal = Mapping[str, Content]
"""Every file of an entry, by name."""


def hash_file(path: Path) -> Content:
    """Hash a file."""
    digest, size = hashlib.sha256(), 0
    for piece in _pieces(path):
        digest.update(piece)
        size += len(piece)
    return Content(size, digest.hexdigest())


def copy_file(source: Path, target: Path) -> Content:
    """Copy a file, wait until the disk holds it, and hash what was read."""
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        for piece in _pieces(source):
            digest.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return Content(size, digest.hexdigest())


def hash_folder(folder: Path) -> Seal:
    """Hash every file of an entry."""
    return {path.name: hash_file(path) for path in content(folder)}


def write_seal(folder: Path, seal: Seal) -> None:
    """Write the seal of a complete entry next to its files atomically, without marking the entry as used."""
    used = folder.stat()
    record = {"done_ns": _done_ns(folder), "files": to_json(seal)}
    replace_text(folder / SEAL, json.dumps(record, indent=1), durable=False, shared=True)
    os.utime(folder, ns=(used.st_atime_ns, used.st_mtime_ns))


def read_seal(folder: Path) -> Seal | None:
    """The seal of an entry as it is now; None if it has none, or one of an earlier compilation.

    Raises:
        FileNotFoundError: The entry is gone, or is not done.
    """
    try:
        record = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        if record["done_ns"] == _done_ns(folder):
            return from_json(record["files"])
    except (FileNotFoundError, RecursionError, ValueError, KeyError, TypeError):
        _done_ns(folder)
    return None


def damage(seal: Seal | None, files: Seal) -> str:
    """Differences of an entry's files from its seal as text; empty if there are none, or no seal."""
    if seal is None:
        return ""
    differences = []
    for name, file in seal.items():
        if name not in files:
            differences.append(f"{name} is missing")
        elif files[name].size_bytes != file.size_bytes:
            differences.append(f"{name} has {files[name].size_bytes:,} bytes, not {file.size_bytes:,}")
        elif files[name] != file:
            differences.append(f"{name} has SHA-256 {files[name].sha256[:12]}..., not {file.sha256[:12]}...")
    return "; ".join(differences)


def to_json(seal: Seal) -> dict[str, Any]:
    """A seal as JSON has it."""
    return {name: asdict(file) for name, file in seal.items()}


def from_json(files: Any) -> Seal:
    """Read a seal back.

    Raises:
        ValueError: It is not a seal of a whole entry, or names files elsewhere.
    """
    try:
        seal = {str(name): Content(int(file["size_bytes"]), str(file["sha256"])) for name, file in files.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no list of files") from error
    for name in seal:
        if not is_content(name):
            raise ValueError(f"{name!r} is no file of an entry")
    alone = len(seal) == 1 and all(name.endswith(".neff") and name != NEFF for name in seal)
    if not alone and not {DONE, NEFF} <= set(seal):
        raise ValueError(f"{DONE} or {NEFF} is missing")
    if not all(_SHA256.fullmatch(file.sha256) for file in seal.values()):
        raise ValueError("a hash is no SHA-256")
    return seal


def _pieces(path: Path) -> Iterator[bytes]:
    """Read a file without changing its access time, where the system allows that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only its owner may read a file unseen
        descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        piece = file.read(_PIECE_BYTES)
        while piece:
            yield piece
            piece = file.read(_PIECE_BYTES)


def _done_ns(folder: Path) -> int:
    return (folder / DONE).stat().st_mtime_ns
