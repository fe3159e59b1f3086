"""What lies in a cache: one folder per compiled graph, and the state that its files tell.

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

NEFF, DONE, LOG = "model.neff", "model.done", "model.log"
LOCK = "model.hlo_module.pb.lock"
SEAL = "nxtrain.json"
"""Our own file in an entry: the hashes of the others."""

_COMPILER = re.compile(r"neuronxcc-[\w.+-]+")
_MODULE = re.compile(r"MODULE_[\w.+-]+")
_FILE = re.compile(r"[\w+-][\w.+-]*")


class State(str, enum.Enum):
    """What an entry is good for."""

    DONE = "done"
    """Compiled: a run loads it."""
    FAILED = "failed"
    """Its compilation failed, and the compiler will not try again."""
    LOCKED = "locked"
    """Somebody works on it."""
    STALE = "stale"
    """Locked by somebody who is gone; whoever needs it waits without end."""
    PENDING = "pending"
    """A graph that is yet to be compiled."""


class Key(NamedTuple):
    """Which graph, compiled by what.

    Args:
        compiler: Folder of the compiler's version, `neuronxcc-<version>`.
        module: `MODULE_<graph>+<flags>`, the hashes of the graph and of the compiler's flags.
    """

    compiler: str
    module: str

    def __str__(self) -> str:
        return f"{self.compiler}/{self.module}"


@dataclass(frozen=True)
class Entry:
    """One folder of the cache, as it was when it was looked at.

    Args:
        key: Which graph.
        folder: Where.
        state: What it is good for.
        size_bytes: Of its files.
        used_s: When it was last changed, marked as used or read, in seconds since the epoch, as the file system tells.
        detail: Why it is in this state, in words; empty where the state says it all.
    """

    key: Key
    folder: Path
    state: State
    size_bytes: int
    used_s: float
    detail: str


IsLive = Callable[[Path, Path], bool]
"""Whether somebody works under a lock: its path, and the entry's."""


def parse_key(text: str) -> Key | None:
    """The key that `compiler/module` writes; None if it is none, as of a name that leads out of the cache."""
    compiler, _, module = text.partition("/")
    return Key(compiler, module) if _COMPILER.fullmatch(compiler) and _MODULE.fullmatch(module) else None


def is_content(name: str) -> bool:
    """Whether a file name belongs to what was compiled; locks, our own files and paths do not."""
    return bool(_FILE.fullmatch(name)) and name != SEAL and not name.endswith(".lock")


def content(folder: Path) -> list[Path]:
    """The files that make an entry, in order of their names."""
    return sorted(path for path in folder.iterdir() if is_content(path.name) and path.is_file())


def locks(folder: Path) -> list[Path]:
    """The lock files in an entry."""
    return sorted(folder.glob("*.lock"))


def scan(root: Path, is_live: IsLive) -> Iterator[Entry]:
    """Every entry below a folder, in order; what vanishes meanwhile is left out."""
    for folder in sorted(root.glob("neuronxcc-*/MODULE_*")):
        key = parse_key(f"{folder.parent.name}/{folder.name}")
        entry = look(folder, key, is_live) if key else None
        if entry:
            yield entry


def look(folder: Path, key: Key, is_live: IsLive) -> Entry | None:
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


def _state(folder: Path, is_live: IsLive) -> tuple[State, str]:
    found = locks(folder)
    live = [lock for lock in found if is_live(lock, folder)]
    if live:
        return State.LOCKED, f"{live[0].name} is held"
    if found:
        return State.STALE, f"whoever made {found[0].name} is gone"
    neff, log = folder / NEFF, folder / LOG
    if (folder / DONE).exists():
        whole = neff.exists() and neff.stat().st_size > 0
        return (State.DONE, "") if whole else (State.FAILED, f"marked done, but {NEFF} is missing or empty")
    if log.exists() and not neff.exists():
        with log.open(encoding="utf-8", errors="replace") as file:
            return State.FAILED, file.readline().strip()
    return State.PENDING, ""
