"""Compiled graphs in a store that nodes share, such as an S3 bucket.

`objects/<sha256>` holds each file under its own hash, so that two nodes that upload the same graph never overwrite each
other's bytes; `entries/<compiler>/<module>.json` lists the files of an entry and is written after all of them. A store
shows a file whole or not at all. Nothing here deletes.
"""

from __future__ import annotations

import json
from pathlib import Path

from nxtrain.common.errors import DamagedError, cause_of
from nxtrain.common.io.checksummed_file import digest_of
from nxtrain.common.io.object_store import ObjectStore, content_of, open_source
from nxtrain.tools.compile.cache import UnusableEntryError
from nxtrain.tools.compile.entries import CacheKey, parse_key
from nxtrain.tools.compile.entry_hashes import Content, Seal, damage, from_json, hash_file, to_json

_ENTRIES, _SUFFIX = "entries", ".json"


class Bucket:
    """Cache of compiled graphs in a store that nodes share."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store.root)

    def done(self) -> set[CacheKey]:
        """Keys of the complete entries."""
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
        """Download an entry and verify its hashes.

        Raises:
            UnusableEntryError: Files of the entry are missing or differ from their hashes.
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
        """Upload an entry: every file that the store lacks, then the list of files. The last of two nodes wins."""
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
            raise UnusableEntryError(f"{_entry(key)} was taken away") from error
        except (RecursionError, ValueError, KeyError, TypeError) as error:
            raise UnusableEntryError(f"{_entry(key)} is no list of files: {cause_of(error)}") from error

    def _has(self, file: Content) -> bool:
        """True if the store has a file of this name and length."""
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
