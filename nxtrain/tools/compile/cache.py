"""Folder of compiled graphs: its entries, and atomic changes that survive kills and concurrent processes.

Folders appear and disappear by one rename each. A process that removes or replaces an entry holds the entry's lock as
the compiler does, so the compiler waits. nxtrain's changes to one cache are serialized by a kernel lock, which the
system releases with its process. Remains of killed processes are in `.nxtrain`, and are swept later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nxtrain.common.errors import BackendError
from nxtrain.common.io.atomic import sync_folder
from nxtrain.tools.compile.entries import DONE, LOCK, CacheKey, Entry, EntryState, content, is_neff, locks, look, scan
from nxtrain.tools.compile.entry_hashes import Seal, copy_file, damage, hash_folder, read_seal, write_seal
from nxtrain.tools.compile.lock_owners import GRACE_S, is_live, lock_is_live, read_owner, this_process
from nxtrain.tools.compile.neffs import Neffs

OWN = ".nxtrain"
"""nxtrain's own folder in a cache; the compiler's folders begin with `neuronxcc-`."""


class UnusableEntryError(Exception):
    """Error of an entry that is damaged or changed during the copy; the message names the reason."""


@dataclass(frozen=True)
class EntryVerdict:
    """Result of the verification of one entry.

    Args:
        key: Key of the entry.
        damage: Differences from the seal as text; empty if there are none.
        is_new: True if the entry had no seal and was sealed by the verification.
    """

    key: CacheKey
    damage: str
    is_new: bool


class Cache:
    """Folder of compiled graphs, of one node or shared.

    Args:
        root: Folder of the `neuronxcc-<version>/` folders; created with the first entry.
        grace_s: Seconds since the last write to an entry for which a lock without an owner counts as live.
    """

    def __init__(self, root: Path, *, grace_s: float = GRACE_S) -> None:
        self.root = root
        self._own = root / OWN
        self._is_live = partial(lock_is_live, grace_s=grace_s)
        self._neffs = Neffs(root, self._own / "seals")

    def __str__(self) -> str:
        return str(self.root)

    def entries(self) -> list[Entry]:
        """Entries, sorted by name."""
        return [*self._neffs.entries(), *scan(self.root, self._is_live)]

    def entry(self, key: CacheKey) -> Entry | None:
        """Entry of a key; None if the cache lacks it."""
        if is_neff(key):
            return self._neffs.entry(key)
        return look(self._folder(key), key, self._is_live)

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
        return [*self._neffs.entries(folder), *scan(folder, self._is_live)]

    def mark_used(self, keys: Iterable[CacheKey]) -> None:
        """Mark entries as used by a run, so they are evicted last."""
        for key in keys:
            with suppress(FileNotFoundError):
                os.utime(self._folder(key))

    def fetch(self, key: CacheKey, target: Path) -> Seal:
        """Copy the files of a done entry.

        Args:
            key: Key of the entry.
            target: An empty folder.

        Raises:
            UnusableEntryError: The entry is damaged, or changed during the copy.
        """
        folder = self._folder(key)
        if is_neff(key):
            return self._fetch_neff(key, target)
        try:
            seal, before = read_seal(folder), _fingerprint(folder)
            copied = {path.name: copy_file(path, target / path.name) for path in content(folder)}
            entry = self.entry(key)
            if entry is None or entry.state is not EntryState.DONE or _fingerprint(folder) != before:
                raise UnusableEntryError("it changed while it was read")
        except FileNotFoundError as error:
            raise UnusableEntryError("it was taken away while it was read") from error
        damaged = damage(seal, copied)
        if damaged:
            raise UnusableEntryError(f"damaged: {damaged}")
        return copied

    def store(self, key: CacheKey, fill: Callable[[Path], Seal]) -> bool:
        """Add an entry, whole or not at all.

        Args:
            key: Key of the entry.
            fill: Writes the files of a complete entry into an empty folder and returns their hashes.

        Returns: True if the entry was added; False if it is present already, or a process works on it.
        """
        if self._is_taken(key):
            return False
        with self.staging() as folder:
            seal = fill(folder)
            if is_neff(key):
                return self._neffs.publish(key, folder, seal)
            write_seal(folder, seal)
            sync_folder(folder)
            with self._alone():
                is_new = self._publish(folder, key)
        return is_new

    def _fetch_neff(self, key: CacheKey, target: Path) -> Seal:
        try:
            return self._neffs.fetch(key, target)
        except FileNotFoundError as error:
            raise UnusableEntryError("it was taken away while it was read") from error
        except ValueError as error:
            raise UnusableEntryError(f"damaged: {error}") from error

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Empty folder on the cache's own disk, deleted after the context, or by `sweep` after a kill."""
        folder = self._own / "staging" / f"{uuid.uuid4().hex} {this_process()}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def verify(self, only: Collection[CacheKey] | None = None) -> Iterator[EntryVerdict]:
        """Verify every done entry against its seal; damaged entries are quarantined, entries without a seal get one.

        Args:
            only: Keys to verify; None: every entry.
        """
        for key in sorted(key for key in self.done() if only is None or key in only):
            if is_neff(key):
                with suppress(FileNotFoundError):
                    yield self._verify_neff(key)
                continue
            folder = self._folder(key)
            with suppress(FileNotFoundError):  # evicted meanwhile
                seal, before = read_seal(folder), _fingerprint(folder)
                hashes = hash_folder(folder)
                damaged = damage(seal, hashes)
                with self._alone():
                    if _fingerprint(folder) != before:
                        continue
                    if seal is None:
                        write_seal(folder, hashes)
                    if damaged:
                        self._quarantine(key)
                yield EntryVerdict(key, damaged, seal is None)

    def _verify_neff(self, key: CacheKey) -> EntryVerdict:
        seal = self._neffs.seal(key)
        hashes = self._neffs.hash(key)
        damaged = damage(seal, hashes)
        with self._alone():
            if seal is None:
                self._neffs.write_seal(key, hashes)
            if damaged:
                self._quarantine(key)
        return EntryVerdict(key, damaged, seal is None)

    def break_locks(self) -> list[CacheKey]:
        """Remove the locks of processes that are gone.

        Returns: Keys of the entries that were locked.
        """
        with self._alone():
            stale = [entry for entry in self.entries() if entry.state is EntryState.STALE]
            for entry in stale:
                self._unlock(entry.folder)
        return [entry.key for entry in stale]

    def disown(self, key: CacheKey) -> None:
        """Make this process the owner of an entry's locks, so that they become stale when it ends."""
        for lock in locks(self._folder(key)):
            with suppress(FileNotFoundError):
                descriptor = os.open(lock, os.O_WRONLY | os.O_TRUNC)  # creates no lock that was released meanwhile
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(str(this_process()))

    def quarantine_failed(self) -> list[CacheKey]:
        """Quarantine failed entries, so that the compiler tries them again.

        Returns: Keys of the moved entries.
        """
        with self._alone():
            failed = [entry.key for entry in self.entries() if entry.state is EntryState.FAILED]
            moved = [key for key in failed if self._quarantine(key)]
        return moved

    def evict(self, max_bytes: int) -> list[CacheKey]:
        """Evict the quarantine first, then the least recently used entries; locked entries stay.

        Args:
            max_bytes: Most bytes to keep.

        Returns: Keys of the removed entries.
        """
        removed = []
        with self._alone():
            quarantined, entries = self.quarantined(), self.entries()
            total = sum(entry.size_bytes for entry in (*quarantined, *entries))
            oldest = sorted(entries, key=lambda entry: entry.used_s)
            for entry in (*quarantined, *(entry for entry in oldest if entry.state is not EntryState.LOCKED)):
                if total <= max_bytes:
                    break
                if is_neff(entry.key):
                    is_removed = self._move_file(entry.key, self._trash(), entry.folder)
                else:
                    is_removed = self._move(entry.folder, self._trash())
                if is_removed:
                    removed.append(entry.key)
                    total -= entry.size_bytes
        return removed

    def sweep(self) -> None:
        """Delete the remains of killed processes."""
        self._empty_trash()
        for folder in (self._own / "staging").glob("*"):
            owner = read_owner(folder.name)
            with suppress(FileNotFoundError):
                if owner is None or not is_live(owner, time.time() - folder.stat().st_mtime):
                    shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, key: CacheKey) -> Path:
        return self.root / key.compiler / key.module

    def _is_taken(self, key: CacheKey) -> bool:
        entry = self.entry(key)
        return entry is not None and entry.state in {EntryState.DONE, EntryState.LOCKED}

    def _publish(self, staged: Path, key: CacheKey) -> bool:
        target = self._folder(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._is_taken(key) or (target.exists() and not self._move(target, self._trash())):
            return False
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:  # the compiler has begun it just now
                return False
            raise
        sync_folder(target.parent)
        return True

    def _quarantine(self, key: CacheKey) -> bool:
        target = self._own / "quarantine" / key.compiler / key.module
        if target.exists():
            target.rename(self._trash())
        if is_neff(key):
            return self._move_file(key, target, self._folder(key))
        return self._move(self._folder(key), target)

    def _move(self, folder: Path, target: Path) -> bool:
        """Move an entry, unless a process works on it."""
        if not self._claim(folder):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        (target / LOCK).unlink(missing_ok=True)  # the trash may have been emptied meanwhile
        return True

    def _move_file(self, key: CacheKey, target: Path, file: Path) -> bool:
        """Move a graph of TorchNeuron; a process that reads the file keeps what it has open."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.rename(target)
        except FileNotFoundError:
            return False
        self._neffs.forget(key)
        return True

    def _claim(self, folder: Path) -> bool:
        """Lock an entry as the compiler does, with a lock that names this process from the start."""
        if any(self._is_live(lock, folder) for lock in locks(folder)):
            return False
        self._unlock(folder)
        draft = self._own / "claim"
        draft.unlink(missing_ok=True)
        draft.write_text(str(this_process()), encoding="utf-8")
        try:
            (folder / LOCK).hardlink_to(draft)
        except (FileExistsError, FileNotFoundError):
            return False
        finally:
            draft.unlink()
        return True

    def _unlock(self, folder: Path) -> None:
        for lock in locks(folder):
            with suppress(FileNotFoundError):
                taken = lock.rename(self._own / "taken")
                if self._is_live(taken, folder):  # another process took the lock after the check: give it back
                    with suppress(FileExistsError):
                        lock.hardlink_to(taken)
                taken.unlink()

    def _trash(self) -> Path:
        trash = self._own / "trash"
        trash.mkdir(exist_ok=True)
        return trash / uuid.uuid4().hex

    def _empty_trash(self) -> None:
        for path in (self._own / "trash").glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other nxtrain processes from changing this cache, at most until this process ends; then tidy up."""
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
        self._empty_trash()  # without the lock, since large folders take long


def _fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of an entry's files; raises FileNotFoundError without `model.done`."""
    (folder / DONE).stat()
    stats = {path.name: path.stat() for path in content(folder)}
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
