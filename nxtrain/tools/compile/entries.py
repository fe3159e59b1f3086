"""Keys, states and snapshots of the compiled graphs in a cache, and the names of their files."""

from __future__ import annotations

import enum
import re
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
