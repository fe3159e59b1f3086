"""Folder of compiled graphs: its entries, and atomic changes that survive kills and concurrent processes.

Entries appear and disappear by one rename each. A process that removes or replaces an entry holds the entry's lock as
the compiler does, so the compiler waits. nxtrain's changes to one cache are serialized by a mutex, a lock of the kernel
that ends with its process. Work in progress is in folders of `.nxtrain`, each locked by its process, and swept later if
the process was killed.
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
"""nxtrain's own folder in a cache; the compiler's folders begin with `neuronxcc-`."""


class UnusableEntryError(Exception):
    """Error of an entry that is damaged or changed during the copy; the message names the reason."""


@dataclass(frozen=True)
class EntryVerdict:
    """Result of the verification of one entry."""

    key: CacheKey
    damage: str
    is_new: bool


class Cache:
    """Folder of compiled graphs, of one node or shared; created with the first entry.

    Within `grace_s` seconds of the last write to an entry, a lock without a process counts as live.
    """

    def __init__(self, root: Path, *, grace_s: float = GRACE_S) -> None:
        self.root = root
        self._own = root / OWN
        self._neffs = NeffFiles(root, self._own / "seals")
        self._folders = ModuleFolders(root, grace_s)

    def __str__(self) -> str:
        return str(self.root)

    def layout(self, compiler: str) -> CacheLayout:
        """CacheLayout of the graphs of a compiler, the first part of their keys."""
        if compiler == NEFF_FOLDER:
            return self._neffs
        return self._folders

    def entries(self) -> list[Entry]:
        """Entries, sorted by name."""
        return [*self._neffs.scan(self.root), *self._folders.scan(self.root)]

    def entry(self, key: CacheKey) -> Entry | None:
        """Entry of a key; None if the cache lacks it."""
        layout = self.layout(key.compiler)
        return layout.look(layout.path(key), key)

    def done(self) -> set[CacheKey]:
        """Keys of the entries that a run can load."""
        return {entry.key for entry in self.entries() if entry.state is EntryState.DONE}

    def size_bytes(self, key: CacheKey) -> int:
        """Size of an entry in bytes; 0 if the cache lacks it."""
        entry = self.entry(key)
        if entry is None:
            return 0
        return entry.size_bytes

    def quarantined(self) -> list[Entry]:
        """Entries in the quarantine, under their original names."""
        folder = self._own / "quarantine"
        return [*self._neffs.scan(folder), *self._folders.scan(folder)]

    def mark_used(self, keys: Iterable[CacheKey]) -> None:
        """Mark entries as used by a run, so they are evicted last."""
        for key in keys:
            with suppress(FileNotFoundError):
                os.utime(self.root / key.compiler / key.module)

    def fetch(self, key: CacheKey, target: Path) -> Seal:
        """Copy the files of a done entry."""
        layout = self.layout(key.compiler)
        try:
            seal = layout.read_seal(key)
            files = layout.files(key)
            before = _fingerprint(files)
            copied = {file.name: copy_file(file, target / file.name) for file in files}
            entry = self.entry(key)
            is_done = entry is not None and entry.state is EntryState.DONE
            if not is_done or _fingerprint(layout.files(key)) != before:
                raise UnusableEntryError("it changed while it was read")
        except FileNotFoundError as error:
            raise UnusableEntryError("it was taken away while it was read") from error
        damaged = damage(seal, copied)
        if damaged:
            raise UnusableEntryError(f"damaged: {damaged}")
        return copied

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Empty folder on the cache's own disk, deleted after the context, or by `sweep` after a kill."""
        folder = self._own / "staging" / uuid.uuid4().hex
        files = folder / "files"
        with ExitStack() as held:
            with self._alone():  # so that `sweep` meets no folder before it is locked
                files.mkdir(parents=True)
                lock = held.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield files
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def store(self, key: CacheKey, folder: Path, seal: Seal) -> bool:
        """Add an entry from a folder of `staging`, whole or not at all; False if it is present or under work."""
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
        """Verify done entries, or `only` some, against their seals; damaged ones are quarantined, others sealed."""
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
        """Remove the locks of processes that are gone; return the keys of the entries that were locked."""
        with self._alone():
            stale = [entry for entry in self.entries() if entry.state is EntryState.STALE]
            for entry in stale:
                self.layout(entry.key.compiler).unlock(entry.folder)
        return [entry.key for entry in stale]

    def disown(self, key: CacheKey) -> None:
        """Give up an entry's locks, which count as stale from now on."""
        layout = self.layout(key.compiler)
        layout.disown(layout.path(key))

    def quarantine_failed(self) -> list[CacheKey]:
        """Quarantine failed entries, so that the compiler tries them again; return their keys."""
        with self._changing() as trash:
            failed = [entry.key for entry in self.entries() if entry.state is EntryState.FAILED]
            return self._quarantine(failed, trash)

    def evict(self, max_bytes: int) -> list[CacheKey]:
        """Evict the quarantine, then the least recently used entries; locked ones stay. Return the removed keys."""
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
        """Delete the remains of killed processes."""
        with self._alone():
            for folder in (self._own / "staging").glob("*"):
                with suppress(BlockingIOError, FileNotFoundError), (folder / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
                    shutil.rmtree(folder, ignore_errors=True)

    def _quarantine(self, keys: Sequence[CacheKey], trash: Path) -> list[CacheKey]:
        """Move entries to the quarantine; earlier entries of the same names there go to the trash."""
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
        """Hold the mutex; yields an empty folder for removed entries, deleted after the mutex is released."""
        with self.staging() as trash, self._alone():
            yield trash

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other nxtrain processes from changing this cache, at most until this process ends."""
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
    """Names, sizes and times of an entry's files."""
    stats = {path.name: path.stat() for path in files}
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
