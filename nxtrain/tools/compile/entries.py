"""Entries of a compile cache: keys, states, file hashes, and the interface of the two file layouts.

The seal of an entry records size and SHA-256 of each of its files. If a file differs from its seal, the entry is
damaged.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

NEFF = "model.neff"
DONE = "model.done"
LOG = "model.log"
LOCK = "model.hlo_module.pb.lock"
SEAL = "nxtrain.json"
"""Name of the file in which nxtrain stores the hashes of an entry's other files."""

NEFF_FOLDER = "neff"
"""Folder of TorchNeuron's compiled graphs in a cache, and the first part of their keys."""

_NEFF_FILE = re.compile(r"(?:[\w+-][\w.+-]*/)*[\w+-][\w.+-]*\.neff")
_COMPILER = re.compile(r"neuronxcc-[\w.+-]+")
_MODULE = re.compile(r"MODULE_[\w.+-]+")
_FILE = re.compile(r"[\w+-][\w.+-]*")


class EntryState(str, enum.Enum):
    """State of one compiled graph in a cache."""

    DONE = "done"
    """The graph is compiled, and a run can load it."""
    FAILED = "failed"
    """The compilation failed, and the compiler will not try the graph again."""
    LOCKED = "locked"
    """A process is compiling or moving the entry."""
    STALE = "stale"
    """The process that locked the entry has ended; a run that needs the entry would wait forever."""
    PENDING = "pending"
    """The graph is not compiled yet."""


class CacheKey(NamedTuple):
    """Key of a compiled graph in a cache, made of compiler version and graph name.

    Args:
        compiler: Folder of the compiler's version, `neuronxcc-<version>`; `neff` for a graph of TorchNeuron.
        module: `MODULE_<graph>+<flags>`, the hashes of the graph and of the compiler's flags. For a graph of
            TorchNeuron, the name of its file.
    """

    compiler: str
    module: str

    def __str__(self) -> str:
        return f"{self.compiler}/{self.module}"


@dataclass(frozen=True)
class Entry:
    """Snapshot of one entry of a compile cache.

    Args:
        folder: Folder of the entry; the file itself for a graph of TorchNeuron.
        used_s: Time of the last change, use mark or read by the file system's clock, in seconds since the epoch.
        detail: Reason for the state; empty if the state needs none.
    """

    key: CacheKey
    folder: Path
    state: EntryState
    size_bytes: int
    used_s: float
    detail: str


def parse_key(text: str) -> CacheKey | None:
    """Parse a cache key from the text `compiler/module`.

    Returns:
        None if the text is not a key, such as a path that leads out of the cache.
    """
    compiler, _, module = text.partition("/")
    if compiler == NEFF_FOLDER:
        is_key = bool(_NEFF_FILE.fullmatch(module))
    else:
        is_key = is_compiler(compiler) and bool(_MODULE.fullmatch(module))
    if not is_key:
        return None
    return CacheKey(compiler, module)


def is_compiler(name: str) -> bool:
    """Return True if a folder name is that of one compiler version's graphs, `neuronxcc-<version>`."""
    return bool(_COMPILER.fullmatch(name))


def is_content(name: str) -> bool:
    """Return True if a file name belongs to an entry's compiled files; locks and nxtrain's own files do not."""
    return bool(_FILE.fullmatch(name)) and name != SEAL and not name.endswith(".lock")


_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Content:
    """Expected size and SHA-256 hash of a file."""

    size_bytes: int
    sha256: str


Seal = Mapping[str, Content]
"""Size and hash of every file of a cache entry, by file name."""


def hash_file(path: Path) -> Content:
    """Compute the size and the SHA-256 hash of a file."""
    digest, size = hashlib.sha256(), 0
    for piece in _pieces(path):
        digest.update(piece)
        size += len(piece)
    return Content(size, digest.hexdigest())


def copy_file(source: Path, target: Path) -> Content:
    """Copy a file, sync the copy to disk, and return size and hash of the bytes read."""
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        for piece in _pieces(source):
            digest.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return Content(size, digest.hexdigest())


def damage(seal: Seal | None, files: Seal) -> str:
    """Describe how an entry's files differ from the hashes in its seal; empty if equal or without a seal."""
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
    """Convert a seal, the file hashes of a cache entry, to JSON types."""
    return {name: asdict(file) for name, file in seal.items()}


def from_json(files: Any) -> Seal:
    """Read a seal, the file hashes of a complete cache entry, from JSON types.

    Raises:
        ValueError: The value is not the seal of a complete entry.
    """
    try:
        seal = {str(name): Content(int(file["size_bytes"]), str(file["sha256"])) for name, file in files.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("a cache entry's record needs size_bytes and sha256 of each file") from error
    for name in seal:
        if not is_content(name):
            raise ValueError(f"{name!r} is not a file of an entry")
    is_one_file = len(seal) == 1 and all(name.endswith(".neff") and name != NEFF for name in seal)
    if not is_one_file and not {DONE, NEFF} <= set(seal):
        raise ValueError(f"{DONE} or {NEFF} is missing")
    if not all(_SHA256.fullmatch(file.sha256) for file in seal.values()):
        raise ValueError("a hash is not a SHA-256")
    return seal


def read_record(path: Path, compilation: str, identity: int) -> Seal | None:
    """Read a seal, the file hashes of a cache entry, from a file.

    Args:
        compilation: Field of the record that identifies the compilation.
        identity: Expected value of this field.

    Returns:
        None if the file is missing or damaged, or belongs to another compilation.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record[compilation] == identity:
            return from_json(record["files"])
    except (FileNotFoundError, RecursionError, ValueError, KeyError, TypeError):
        pass
    return None


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces, without changing its access time where the system allows that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner of a file may use O_NOATIME
        descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        piece = file.read(_PIECE_BYTES)
        while piece:
            yield piece
            piece = file.read(_PIECE_BYTES)


class CacheLayout(ABC):
    """Interface of a file layout of compiled graphs in a cache: PyTorch/XLA's folders or TorchNeuron's files."""

    patience_s = 0.0
    """Seconds after which a new graph whose compiler process is unknown counts as compiled by the watching run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: CacheKey) -> Path:
        """Path of the entry of a key in the cache."""
        return self.root / key.compiler / key.module

    @abstractmethod
    def scan(self, root: Path) -> Iterator[Entry]:
        """Yield all entries below `root`, sorted by name.

        Entries that vanish during the scan are skipped.

        Args:
            root: Folder of the cache or of its quarantine.
        """

    @abstractmethod
    def look(self, path: Path, key: CacheKey) -> Entry | None:
        """Read the entry at a path; None if there is no entry."""

    @abstractmethod
    def files(self, key: CacheKey) -> list[Path]:
        """Paths of the compiled files of a done entry, sorted by name.

        Raises:
            FileNotFoundError: The entry is missing or is not done.
        """

    @abstractmethod
    def read_seal(self, key: CacheKey) -> Seal | None:
        """Read the seal (file hashes) of a done entry; None if missing or of an earlier compilation."""

    @abstractmethod
    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        """Write the seal (file hashes) of a complete entry atomically, without updating its time of last use."""

    @abstractmethod
    def publish(self, staged: Path, key: CacheKey, seal: Seal) -> bool:
        """Move the staged files of an entry into the cache atomically; False if the entry exists already."""

    @abstractmethod
    def move(self, path: Path, key: CacheKey, target: Path) -> bool:
        """Move an entry out of the cache; the caller must hold the mutex.

        Returns:
            False if a process has locked the entry, or if the entry is gone.
        """

    def unlock(self, path: Path) -> None:
        """Remove the stale locks of an entry."""

    def mark_lock_stale(self, path: Path) -> None:
        """Mark the locks of an entry as stale."""

    @abstractmethod
    def begun(self) -> Iterator[tuple[CacheKey, Hashable]]:
        """Yield the graphs whose compilation has begun or ended, each with an identity of that compilation."""
