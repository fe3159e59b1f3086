"""Compiled graphs in a cache: keys, states, hashes of their files, and the interface of the two layouts.

The seal of an entry has the hashes of its complete files. A damaged entry does not match its seal.
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
"""nxtrain's own file in an entry, with the hashes of the other files."""

NEFF_FOLDER = "neff"
"""Folder of TorchNeuron's graphs in a cache, and the first part of their keys."""

_NEFF_FILE = re.compile(r"(?:[\w+-][\w.+-]*/)*[\w+-][\w.+-]*\.neff")
_COMPILER = re.compile(r"neuronxcc-[\w.+-]+")
_MODULE = re.compile(r"MODULE_[\w.+-]+")
_FILE = re.compile(r"[\w+-][\w.+-]*")


class EntryState(str, enum.Enum):
    """State of an entry."""

    DONE = "done"
    """Compiled: a run loads it."""
    FAILED = "failed"
    """Its compilation failed, and the compiler will not try again."""
    LOCKED = "locked"
    """A process works on it."""
    STALE = "stale"
    """Locked by a process that is gone; a run that needs the entry waits without end."""
    PENDING = "pending"
    """A graph that is yet to be compiled."""


class CacheKey(NamedTuple):
    """Key of a compiled graph and its compiler.

    Args:
        compiler: Folder of the compiler's version, `neuronxcc-<version>`; `neff` for a graph of TorchNeuron.
        module: `MODULE_<graph>+<flags>`, the hashes of the graph and of the compiler's flags; or the name of the file.
    """

    compiler: str
    module: str

    def __str__(self) -> str:
        return f"{self.compiler}/{self.module}"


@dataclass(frozen=True)
class Entry:
    """Snapshot of one entry of the cache.

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
    """Parse `compiler/module`; None if the text is not a key, such as a name that leads out of the cache."""
    compiler, _, module = text.partition("/")
    if compiler == NEFF_FOLDER:
        is_key = bool(_NEFF_FILE.fullmatch(module))
    else:
        is_key = is_compiler(compiler) and bool(_MODULE.fullmatch(module))
    if not is_key:
        return None
    return CacheKey(compiler, module)


def is_compiler(name: str) -> bool:
    """True if a name is that of a folder of one compiler's graphs."""
    return bool(_COMPILER.fullmatch(name))


def is_content(name: str) -> bool:
    """True if a file name belongs to the compiled files; locks, nxtrain's own files and paths do not."""
    return bool(_FILE.fullmatch(name)) and name != SEAL and not name.endswith(".lock")


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


def read_record(path: Path, compilation: str, identity: int) -> Seal | None:
    """Read the seal in a file; None if the file is absent or damaged, or is of a compilation of another identity."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record[compilation] == identity:
            return from_json(record["files"])
    except (FileNotFoundError, RecursionError, ValueError, KeyError, TypeError):
        pass
    return None


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


class CacheLayout(ABC):
    """Files of one lane's graphs in a cache."""

    patience_s = 0.0
    """Seconds after which a graph that no process names counts as compiled by the run that watches."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: CacheKey) -> Path:
        """Path of an entry in the cache."""
        return self.root / key.compiler / key.module

    @abstractmethod
    def scan(self, root: Path) -> Iterator[Entry]:
        """Entries of the cache or of its quarantine, sorted; entries that vanish during the scan are left out."""

    @abstractmethod
    def look(self, path: Path, key: CacheKey) -> Entry | None:
        """Entry at a path; None if there is none."""

    @abstractmethod
    def files(self, key: CacheKey) -> list[Path]:
        """Compiled files of a done entry, sorted by name; a FileNotFoundError for any other."""

    @abstractmethod
    def read_seal(self, key: CacheKey) -> Seal | None:
        """Seal of a done entry; None if it has none, or one of an earlier compilation."""

    @abstractmethod
    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        """Write the seal of a complete entry atomically, without marking the entry as used."""

    @abstractmethod
    def publish(self, staged: Path, key: CacheKey, seal: Seal) -> bool:
        """Move a folder's files into the cache in one step; False if the entry's name is in use."""

    @abstractmethod
    def move(self, path: Path, key: CacheKey, target: Path) -> bool:
        """Move an entry out of use; False if a process works on it, or if it is gone. The caller holds the mutex."""

    def unlock(self, path: Path) -> None:
        """Remove the stale locks of an entry."""

    def disown(self, path: Path) -> None:
        """Give up the locks of an entry, which count as stale from now on."""

    @abstractmethod
    def begun(self) -> Iterator[tuple[CacheKey, Hashable]]:
        """Graphs on which compilers work, or have worked, each with the identity of that work."""
