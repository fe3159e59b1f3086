"""Entries of a cache: one folder per compiled graph, and the state derived from its files.

The compiler's layout is `neuronxcc-<version>/MODULE_<graph>+<flags>/` with `model.hlo_module.pb` (the graph),
`compile_flags.json`, `model.neff` and an empty `model.done` on success, `model.log` on failure, and a file ending in
`.lock` while it works.

Source: AWS Neuron documentation, "Neuron Persistent Cache"; Hugging Face optimum-neuron, `optimum/neuron/cache`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
        key: Key of the graph.
        folder: Folder of the entry; the file itself for a graph of TorchNeuron.
        state: State of the entry.
        size_bytes: Size of its files.
        used_s: Time of the last change, use mark or read by the file system's clock, in seconds since the epoch.
        detail: Reason for the state; empty if the state needs none.
    """

    key: CacheKey
    folder: Path
    state: EntryState
    size_bytes: int
    used_s: float
    detail: str


IsLive = Callable[[Path, Path], bool]
"""True if a process works under a lock; takes the lock's path and the entry's folder."""


def parse_key(text: str) -> CacheKey | None:
    """Parse `compiler/module`; None if the text is not a key, such as a name that leads out of the cache."""
    compiler, _, module = text.partition("/")
    key = CacheKey(compiler, module)
    if is_neff(key) or (_COMPILER.fullmatch(compiler) and _MODULE.fullmatch(module)):
        return key
    return None


def is_compiler(name: str) -> bool:
    """True if a name is that of a folder of one compiler's graphs."""
    return bool(_COMPILER.fullmatch(name))


def is_neff(key: CacheKey) -> bool:
    """True if a key is that of a file of TorchNeuron, such as `neff/ab/cd/<hash>.neff`."""
    return key.compiler == NEFF_FOLDER and bool(_NEFF_FILE.fullmatch(key.module))


def is_content(name: str) -> bool:
    """True if a file name belongs to the compiled files; locks, nxtrain's own files and paths do not."""
    return bool(_FILE.fullmatch(name)) and name != SEAL and not name.endswith(".lock")


def content(folder: Path) -> list[Path]:
    """Compiled files of an entry, sorted by name."""
    return sorted(path for path in folder.iterdir() if is_content(path.name) and path.is_file())


def locks(folder: Path) -> list[Path]:
    """The lock files in an entry."""
    return sorted(folder.glob("*.lock"))


def scan(root: Path, is_live: IsLive) -> Iterator[Entry]:
    """Entries below a folder, sorted; entries that vanish during the scan are left out."""
    for folder in sorted(root.glob("neuronxcc-*/MODULE_*")):
        key = parse_key(f"{folder.parent.name}/{folder.name}")
        if key is None:
            continue
        entry = look(folder, key, is_live)
        if entry is not None:
            yield entry


def look(folder: Path, key: CacheKey, is_live: IsLive) -> Entry | None:
    """One entry; None if there is none."""
    try:
        state, detail = _state(folder, is_live)
        stats = {path.name: path.stat() for path in folder.iterdir()}
        used_s = folder.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    if NEFF in stats:
        used_s = max(used_s, stats[NEFF].st_atime)
    return Entry(key, folder, state, sum(stat.st_size for stat in stats.values()), used_s, detail)


def _state(folder: Path, is_live: IsLive) -> tuple[EntryState, str]:
    lock_files = locks(folder)
    live = [lock for lock in lock_files if is_live(lock, folder)]
    if live:
        return EntryState.LOCKED, f"{live[0].name} is held"
    if lock_files:
        return EntryState.STALE, f"whoever made {lock_files[0].name} is gone"
    neff, log = folder / NEFF, folder / LOG
    if (folder / DONE).exists():
        if neff.exists() and neff.stat().st_size > 0:
            return EntryState.DONE, ""
        return EntryState.FAILED, f"marked done, but {NEFF} is missing or empty"
    if log.exists() and not neff.exists():
        with log.open(encoding="utf-8", errors="replace") as file:
            return EntryState.FAILED, file.readline().strip()
    return EntryState.PENDING, ""
