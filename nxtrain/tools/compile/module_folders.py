"""Cache layout of PyTorch/XLA's graphs: one folder for each graph, with the compiler's locks.

The compiler's layout is `neuronxcc-<version>/MODULE_<graph>+<flags>/`. It contains `model.hlo_module.pb` (the graph)
and `compile_flags.json`. On success the compiler adds `model.neff` and an empty `model.done`, on failure `model.log`.
During compilation there is a file ending in `.lock`. nxtrain's seal is next to these files. It belongs to one
compilation, identified by the time of `model.done`, which the compiler writes last.

The compiler's locks are empty files. A killed process leaves its lock behind. Every later run waits for such a lock
without end ("Another process must be compiling MODULE_..."). A process that holds such a lock is recognized by its
command line, which names the entry. nxtrain locks an entry only while it holds the cache's mutex. So a process that
holds the mutex may break nxtrain's own locks.

Source: AWS Neuron documentation, "Neuron Persistent Cache"; Hugging Face optimum-neuron, `optimum/neuron/cache`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import suppress
from pathlib import Path

from nxtrain.common.io.atomic import replace_text, sync_folder
from nxtrain.tools.compile.entries import (
    DONE,
    LOCK,
    LOG,
    NEFF,
    SEAL,
    CacheKey,
    CacheLayout,
    Entry,
    EntryState,
    Seal,
    is_content,
    parse_key,
    read_record,
    to_json,
)

OURS = "nxtrain"
"""Content of nxtrain's own lock files; the compiler's lock files are empty."""

GRACE_S = 300.0
"""Seconds after the last write to an entry during which the compiler's lock counts as live.

The compiler may be about to start, or may have just ended.
"""


class ModuleFolders(CacheLayout):
    """Cache layout of PyTorch/XLA: one folder for each compiled graph."""

    patience_s = 15.0
    """Seconds to wait for the compiler process of a new lock to appear."""

    def __init__(self, root: Path, grace_s: float = GRACE_S) -> None:
        super().__init__(root)
        self._grace_s = grace_s

    def scan(self, root: Path) -> Iterator[Entry]:
        for folder, key in _folders(root):
            entry = self.look(folder, key)
            if entry is not None:
                yield entry

    def look(self, path: Path, key: CacheKey) -> Entry | None:
        try:
            state, detail = self._state(path)
            stats = {file.name: file.stat() for file in path.iterdir()}
            used_s = path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        if NEFF in stats:
            used_s = max(used_s, stats[NEFF].st_atime)
        return Entry(key, path, state, sum(stat.st_size for stat in stats.values()), used_s, detail)

    def files(self, key: CacheKey) -> list[Path]:
        folder = self.path(key)
        _done_ns(folder)
        return sorted(path for path in folder.iterdir() if is_content(path.name) and path.is_file())

    def read_seal(self, key: CacheKey) -> Seal | None:
        folder = self.path(key)
        return read_record(folder / SEAL, "done_ns", _done_ns(folder))

    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        _write_seal(self.path(key), seal)

    def publish(self, staged: Path, key: CacheKey, seal: Seal) -> bool:
        _write_seal(staged, seal)
        sync_folder(staged)
        target = self.path(key)
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:  # the compiler has begun it just now
                return False
            raise
        sync_folder(target.parent)
        return True

    def move(self, path: Path, key: CacheKey, target: Path) -> bool:
        """Move an entry's folder under a lock like the compiler's, so that the compiler waits."""
        self.unlock(path)
        if _locks(path):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (path / LOCK).open("x", encoding="utf-8") as file:
                file.write(OURS)
        except (FileExistsError, FileNotFoundError):
            return False
        path.rename(target)
        (target / LOCK).unlink()
        return True

    def unlock(self, path: Path) -> None:
        for lock in _locks(path):
            if not self._is_live(lock):
                lock.unlink(missing_ok=True)

    def mark_lock_stale(self, path: Path) -> None:
        for lock in _locks(path):
            with suppress(FileNotFoundError):
                descriptor = os.open(lock, os.O_WRONLY | os.O_TRUNC)  # creates no lock that was released meanwhile
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(OURS)

    def begun(self) -> Iterator[tuple[CacheKey, Hashable]]:
        """Yield the graphs that the compiler has locked, each with the identity of the lock file."""
        for folder, key in _folders(self.root):
            if (folder / DONE).exists():
                continue
            for lock in _locks(folder):
                with suppress(FileNotFoundError):
                    stat = lock.stat()
                    if not stat.st_size:
                        yield key, (stat.st_ino, stat.st_mtime_ns)

    def _state(self, folder: Path) -> tuple[EntryState, str]:
        lock_files = _locks(folder)
        for lock in lock_files:
            if self._is_live(lock):
                return EntryState.LOCKED, f"{lock.name} is held"
        if lock_files:
            return EntryState.STALE, f"the process that made {lock_files[0].name} has ended"
        neff, log = folder / NEFF, folder / LOG
        if (folder / DONE).exists():
            if neff.exists() and neff.stat().st_size > 0:
                return EntryState.DONE, ""
            return EntryState.FAILED, f"marked done, but {NEFF} is missing or empty"
        if log.exists() and not neff.exists():
            with log.open(encoding="utf-8", errors="replace") as file:
                return EntryState.FAILED, file.readline().strip()
        return EntryState.PENDING, ""

    def _is_live(self, lock: Path) -> bool:
        """Return True if a compiler holds the lock, may be about to start, or may have just ended."""
        folder = lock.parent
        try:
            stat = lock.stat()
            if stat.st_size or stat.st_mtime < booted_s():
                return False
            written_s = max([stat.st_mtime, *(path.stat().st_mtime for path in folder.iterdir())])
        except FileNotFoundError:
            return True  # a process that removed a file just now was at work
        return time.time() - written_s < self._grace_s or any(naming(folder.name))


def _folders(root: Path) -> Iterator[tuple[Path, CacheKey]]:
    for folder in sorted(root.glob("neuronxcc-*/MODULE_*")):
        key = parse_key(f"{folder.parent.name}/{folder.name}")
        if key is not None:
            yield folder, key


def _locks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.lock"))


def _write_seal(folder: Path, seal: Seal) -> None:
    used = folder.stat()
    record = {"done_ns": _done_ns(folder), "files": to_json(seal)}
    replace_text(folder / SEAL, json.dumps(record, indent=1), durable=False, shared=True)
    os.utime(folder, ns=(used.st_atime_ns, used.st_mtime_ns))


def _done_ns(folder: Path) -> int:
    """Modification time of `model.done` in nanoseconds; raises FileNotFoundError if the file is missing."""
    return (folder / DONE).stat().st_mtime_ns


PROC = Path("/proc")

_PARENT_FIELD = 1
"""Index of the parent's PID in `/proc/PID/stat`, counted after the command's name."""


def naming(entry: str) -> Iterator[int]:
    """Yield the PIDs of other processes whose command line names a cache entry, as that of its compiler does."""
    name = entry.encode()
    for process in PROC.glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and name in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:  # it has ended, or is another user's
            continue


def descends(pid: int, ancestor: int) -> bool:
    """Return True if a process is `ancestor` or its descendant, through parents that still run."""
    while pid > 1 and pid != ancestor:
        try:
            text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        # The command's name stands in brackets and may itself hold blanks and brackets.
        pid = int(text.rpartition(")")[2].split()[_PARENT_FIELD])
    return pid == ancestor


def booted_s() -> float:
    """Boot time of this machine in seconds since the epoch; 0 if unknown."""
    try:
        lines = (PROC / "stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    for line in lines:
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
