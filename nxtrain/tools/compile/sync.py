"""Sync of compiled graphs between a node's cache and a shared folder or bucket.

Done entries that the target lacks are copied, complete and verified, or not at all. No entry is deleted or overwritten.
Any number of nodes may sync at the same time.

A bucket holds each file as `objects/<sha256>`. So two nodes that upload the same graph never overwrite each other's
bytes. `entries/<compiler>/<module>.json` lists the files of an entry, and is written after all of them. An object store
shows a file either complete or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from nxtrain.common.errors import ConfigError, DamagedError, cause_of
from nxtrain.common.io.checksummed_file import digest_of
from nxtrain.common.io.object_store import ObjectStore, content_of, open_source
from nxtrain.common.io.paths import copying
from nxtrain.common.process.progress import Progress
from nxtrain.tools.compile.cache import Cache, UnusableEntryError
from nxtrain.tools.compile.entries import CacheKey, Content, Seal, damage, from_json, hash_file, parse_key, to_json

_ENTRIES, _SUFFIX = "entries", ".json"


class Bucket:
    """Cache of compiled graphs in object storage, which nodes share."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store.root)

    def done(self) -> set[CacheKey]:
        """Keys of the complete entries in the bucket."""
        keys = set()
        for name in self._store.sizes(_ENTRIES):
            key = parse_key(name.removeprefix(f"{_ENTRIES}/").removesuffix(_SUFFIX))
            if name.endswith(_SUFFIX) and key is not None:
                keys.add(key)
        return keys

    def size_bytes(self, key: CacheKey) -> int:
        """Size of an entry in bytes; 0 if its list of files is unusable."""
        try:
            return sum(file.size_bytes for file in self._seal(key).values())
        except UnusableEntryError:
            return 0

    def fetch(self, key: CacheKey, target: Path) -> Seal:
        """Download the files of a cache entry into a folder, and return their verified hashes.

        Raises:
            UnusableEntryError: The entry is damaged or was deleted.
        """
        seal = self._seal(key)
        for name, file in seal.items():
            try:
                self._store.download(_object(file), target / name)
            except FileNotFoundError as error:
                raise UnusableEntryError(f"damaged: {self._store.root / _object(file)} is missing") from error
        damaged = damage(seal, {name: hash_file(target / name) for name in seal})
        if damaged:
            raise UnusableEntryError(f"damaged: {damaged}")
        return seal

    def store(self, key: CacheKey, folder: Path, seal: Seal) -> bool:
        """Upload an entry: first every file that the bucket lacks, then the list of files.

        If two nodes upload the same entry, the later list of files replaces the earlier one.
        """
        try:
            for name, file in seal.items():
                if not self._has(file):
                    self._store.upload(_object(file), folder / name, digest_of(folder / name))
        except DamagedError as error:
            raise UnusableEntryError(str(error)) from error
        self._store.put(_entry(key), json.dumps({"files": to_json(seal)}, indent=1).encode())
        return True

    def _seal(self, key: CacheKey) -> Seal:
        try:
            return from_json(json.loads(content_of(self._store.root / _entry(key)))["files"])
        except FileNotFoundError as error:
            raise UnusableEntryError(f"{_entry(key)} was deleted during the sync") from error
        except (RecursionError, ValueError, KeyError, TypeError) as error:
            raise UnusableEntryError(f"{_entry(key)} is not a list of files of an entry: {cause_of(error)}") from error

    def _has(self, file: Content) -> bool:
        """Return True if the bucket has a file of the same hash and size."""
        try:
            source = open_source(self._store.root / _object(file))
        except DamagedError:
            return False
        source.close()
        return source.num_bytes == file.size_bytes


def _object(file: Content) -> str:
    return f"objects/{file.sha256}"


def _entry(key: CacheKey) -> str:
    return f"{_ENTRIES}/{key}{_SUFFIX}"


CacheLocation = Cache | Bucket


@dataclass
class Report:
    """Result of a sync: keys of the entries copied, present before, locked by another process, and unusable."""

    copied: list[CacheKey] = field(default_factory=list)
    size_bytes: int = 0
    present: list[CacheKey] = field(default_factory=list)
    busy: list[CacheKey] = field(default_factory=list)
    unusable: dict[CacheKey, str] = field(default_factory=dict)


def sync(source: CacheLocation, target: CacheLocation, progress: Progress | None = None) -> Report:
    """Copy every done entry that the target cache lacks, and display the progress in bytes after each entry."""
    if isinstance(source, Bucket) and isinstance(target, Bucket):
        way_out = f"one must be a folder, or use: {copying(str(target), 'SRC DST')}"
        raise ConfigError(f"{source} and {target} are both buckets; {way_out}")
    if isinstance(source, Cache) and not source.root.is_dir():
        raise ConfigError(f"{source} is not a folder; name the folder of a compile cache, which nxtrain compile makes")
    if isinstance(source, Cache) and isinstance(target, Cache) and source.root.resolve() == target.root.resolve():
        raise ConfigError(f"{source} and {target} are the same folder; name two different caches")
    # Files are staged next to the target, or next to the source if the target is a bucket.
    staging = source if isinstance(target, Bucket) else target
    assert isinstance(staging, Cache)
    wanted, there = source.done(), target.done()
    report = Report(present=sorted(wanted & there))
    sizes = {key: source.size_bytes(key) for key in sorted(wanted - there)}
    bytes_done, bytes_total = 0, sum(sizes.values())
    for num_done, (key, size_bytes) in enumerate(sizes.items(), start=1):
        try:
            with staging.staging() as folder:
                is_stored = target.store(key, folder, source.fetch(key, folder))
            if is_stored:
                report.copied.append(key)
                report.size_bytes += size_bytes
            else:
                report.busy.append(key)
        except UnusableEntryError as error:
            report.unusable[key] = str(error)
        bytes_done += size_bytes
        if progress is not None:
            progress.total = bytes_total
            progress.show(bytes_done, f"entry {num_done} of {len(sizes)}  {key.module}")
    return report
