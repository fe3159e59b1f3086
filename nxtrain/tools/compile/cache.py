"""Compile cache: a folder of compiled graphs, with changes that are atomic under kills and concurrent processes.

An entry appears or disappears by one rename. A process that removes or replaces an entry holds the entry's lock as the
compiler does, so the compiler waits. A mutex serializes nxtrain's changes to one cache. It is a kernel lock, which the
kernel releases when its process ends. Unfinished files are in folders below `.nxtrain`, each locked by its process. If
the process was killed, a later sweep deletes its folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nxtrain.common.errors import BackendError
from nxtrain.tools.compile.entries import (
    NEFF_FOLDER,
    CacheKey,
    CacheLayout,
    Entry,
    EntryState,
    Seal,
    copy_file,
    damage,
    hash_file,
)
from nxtrain.tools.compile.module_folders import GRACE_S, ModuleFolders
from nxtrain.tools.compile.neff_files import NeffFiles

OWN = ".nxtrain"
"""Folder with nxtrain's own files in a cache; the compiler's folders begin with `neuronxcc-`."""


class UnusableEntryError(Exception):
    """Error for a cache entry that is damaged or changed during a copy; the message has the reason."""


@dataclass(frozen=True)
class EntryVerdict:
    """Result of verifying one cache entry against the stored hashes of its files."""

    key: CacheKey
    damage: str
    is_new: bool


class Cache:
    """Folder of compiled graphs, used by one node or shared by several; created with the first entry.

    Args:
        root: Path of the folder.
        grace_s: Seconds after the last write to an entry during which a lock without a process counts as live.
    """

    def __init__(self, root: Path, *, grace_s: float = GRACE_S) -> None:
        self.root = root
        self._own = root / OWN
        self._neffs = NeffFiles(root, self._own / "seals")
        self._folders = ModuleFolders(root, grace_s)

    def __str__(self) -> str:
        return str(self.root)

    def layout(self, compiler: str) -> CacheLayout:
        """File layout of the entries of one compiler.

        Args:
            compiler: First part of the entries' keys.
        """
        if compiler == NEFF_FOLDER:
            return self._neffs
        return self._folders

    def entries(self) -> list[Entry]:
        """All entries of the cache, sorted by name."""
        return [*self._neffs.scan(self.root), *self._folders.scan(self.root)]

    def entry(self, key: CacheKey) -> Entry | None:
        """Look up the entry of a key; None if the cache has no such entry."""
        layout = self.layout(key.compiler)
        return layout.look(layout.path(key), key)

    def done(self) -> set[CacheKey]:
        """Keys of the completely compiled entries, which a run can load."""
        return {entry.key for entry in self.entries() if entry.state is EntryState.DONE}

    def size_bytes(self, key: CacheKey) -> int:
        """Size of an entry in bytes; 0 if the cache has no such entry."""
        entry = self.entry(key)
        if entry is None:
            return 0
        return entry.size_bytes

    def quarantined(self) -> list[Entry]:
        """Entries in the cache's quarantine, under their original names."""
        folder = self._own / "quarantine"
        return [*self._neffs.scan(folder), *self._folders.scan(folder)]

    def mark_used(self, keys: Iterable[CacheKey]) -> None:
        """Update the time of last use of entries, so that other entries are evicted first."""
        for key in keys:
            with suppress(FileNotFoundError):
                os.utime(self.root / key.compiler / key.module)

    def fetch(self, key: CacheKey, target: Path) -> Seal:
        """Copy the files of a completely compiled entry into a folder, and return their hashes.

        Raises:
            UnusableEntryError: The entry is damaged, or was changed or removed during the copy.
        """
        layout = self.layout(key.compiler)
        try:
            seal = layout.read_seal(key)
            files = layout.files(key)
            before = _fingerprint(files)
            copied = {file.name: copy_file(file, target / file.name) for file in files}
            entry = self.entry(key)
            is_done = entry is not None and entry.state is EntryState.DONE
            if not is_done or _fingerprint(layout.files(key)) != before:
                raise UnusableEntryError("the cache entry changed while it was copied")
        except FileNotFoundError as error:
            raise UnusableEntryError("the cache entry was removed while it was copied") from error
        damaged = damage(seal, copied)
        if damaged:
            raise UnusableEntryError(f"damaged: {damaged}")
        return copied

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Create an empty folder on the cache's own disk, deleted when the context ends.

        If the process is killed, `sweep` deletes the folder.
        """
        folder = self._own / "staging" / uuid.uuid4().hex
        files = folder / "files"
        with ExitStack() as held:
            with self._locked():  # so that `sweep` finds no folder before it is locked
                files.mkdir(parents=True)
                lock = held.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield files
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def store(self, key: CacheKey, folder: Path, seal: Seal) -> bool:
        """Add an entry to the cache atomically, from files in a folder of `staging`.

        Returns:
            False if the entry is already compiled, or if another process has locked it.
        """
        layout = self.layout(key.compiler)
        target = layout.path(key)
        with self._changing() as trash:
            entry = self.entry(key)
            if entry is not None and entry.state in {EntryState.DONE, EntryState.LOCKED}:
                return False
            if target.exists() and not layout.move(target, key, trash / "replaced"):
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            return layout.publish(folder, key, seal)

    def verify(self, only: Collection[CacheKey] | None = None) -> Iterator[EntryVerdict]:
        """Verify the files of completely compiled entries against their stored hashes.

        Damaged entries are quarantined. Hashes are stored for entries that have none.

        Args:
            only: Keys of the entries to verify; None: all done entries.
        """
        for key in sorted(key for key in self.done() if only is None or key in only):
            layout = self.layout(key.compiler)
            with suppress(FileNotFoundError):  # evicted meanwhile
                seal = layout.read_seal(key)
                files = layout.files(key)
                before = _fingerprint(files)
                hashes = {file.name: hash_file(file) for file in files}
                damaged = damage(seal, hashes)
                with self._changing() as trash:
                    if _fingerprint(layout.files(key)) != before:
                        continue
                    if seal is None:
                        layout.write_seal(key, hashes)
                    if damaged:
                        self._quarantine([key], trash)
                yield EntryVerdict(key, damaged, seal is None)

    def break_locks(self) -> list[CacheKey]:
        """Remove locks whose process has ended, and return the keys of the entries that were locked."""
        with self._locked():
            stale = [entry for entry in self.entries() if entry.state is EntryState.STALE]
            for entry in stale:
                self.layout(entry.key.compiler).unlock(entry.folder)
        return [entry.key for entry in stale]

    def mark_lock_stale(self, key: CacheKey) -> None:
        """Mark an entry's locks as stale, so that other processes may break them."""
        layout = self.layout(key.compiler)
        layout.mark_lock_stale(layout.path(key))

    def quarantine_failed(self) -> list[CacheKey]:
        """Quarantine entries whose compilation failed, so that the compiler tries them again; return their keys."""
        with self._changing() as trash:
            failed = [entry.key for entry in self.entries() if entry.state is EntryState.FAILED]
            return self._quarantine(failed, trash)

    def evict(self, max_bytes: int) -> list[CacheKey]:
        """Delete entries until the cache is at most `max_bytes` large, and return their keys.

        Quarantined entries are deleted first, then the least recently used ones. Locked entries are kept.
        """
        removed: list[CacheKey] = []
        with self._changing() as trash:
            quarantined, entries = self.quarantined(), self.entries()
            total = sum(entry.size_bytes for entry in (*quarantined, *entries))
            oldest = sorted(entries, key=lambda entry: entry.used_s)
            for entry in (*quarantined, *(entry for entry in oldest if entry.state is not EntryState.LOCKED)):
                if total <= max_bytes:
                    break
                layout = self.layout(entry.key.compiler)
                if layout.move(entry.folder, entry.key, trash / str(len(removed))):
                    removed.append(entry.key)
                    total -= entry.size_bytes
        return removed

    def sweep(self) -> None:
        """Delete staging folders of processes that were killed."""
        with self._locked():
            for folder in (self._own / "staging").glob("*"):
                with suppress(BlockingIOError, FileNotFoundError), (folder / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
                    shutil.rmtree(folder, ignore_errors=True)

    def _quarantine(self, keys: Sequence[CacheKey], trash: Path) -> list[CacheKey]:
        """Move entries to the quarantine, and return the keys of the moved entries.

        Older entries of the same names there are moved to the folder `trash`.
        """
        moved = []
        for number, key in enumerate(keys):
            target = self._own / "quarantine" / key.compiler / key.module
            if target.exists():
                target.rename(trash / str(number))
            layout = self.layout(key.compiler)
            if layout.move(layout.path(key), key, target):
                moved.append(key)
        return moved

    @contextmanager
    def _changing(self) -> Iterator[Path]:
        """Hold the mutex, and yield an empty folder for removed entries.

        The folder is deleted after the mutex is released.
        """
        with self.staging() as trash, self._locked():
            yield trash

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the mutex that excludes other nxtrain processes from changing this cache.

        The kernel releases the mutex when this process ends.
        """
        self._own.mkdir(parents=True, exist_ok=True)
        with (self._own / "mutex").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise BackendError(
                    f"{self.root} is on a file system without file locks ({error.strerror}); "
                    "mount it with them (Lustre: -o flock), or use another folder"
                ) from error
            yield


def _fingerprint(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size in bytes and modification time in nanoseconds of each of an entry's files."""
    stats = {path.name: path.stat() for path in files}
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
