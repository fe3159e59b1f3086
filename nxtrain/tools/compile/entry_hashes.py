"""Seal of an entry: the hashes of its complete files. A damaged entry does not match its seal."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nxtrain.tools.compile.entries import DONE, NEFF, is_content

_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Content:
    """Expected content of a file."""

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
    """Seal in the types of JSON."""
    return {name: asdict(file) for name, file in seal.items()}


def from_json(files: Any) -> Seal:
    """Read a seal of a whole entry from the types of JSON; a ValueError for anything else."""
    try:
        seal = {str(name): Content(int(file["size_bytes"]), str(file["sha256"])) for name, file in files.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("no list of files") from error
    for name in seal:
        if not is_content(name):
            raise ValueError(f"{name!r} is not a file of an entry")
    is_one_file = len(seal) == 1 and all(name.endswith(".neff") and name != NEFF for name in seal)
    if not is_one_file and not {DONE, NEFF} <= set(seal):
        raise ValueError(f"{DONE} or {NEFF} is missing")
    if not all(_SHA256.fullmatch(file.sha256) for file in seal.values()):
        raise ValueError("a hash is not a SHA-256")
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
