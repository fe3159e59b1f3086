"""TorchNeuron's graphs in a cache: one file for each, `neff/<ab>/<cd>/<hash>.neff`, named by a hash of its input.

TorchNeuron writes a file under another name and renames it, so a file is whole, on network file systems too. Its locks
are elsewhere and end with their process. AWS's pages name the folder's variable, not the layout below, so every `.neff`
file below the folder counts, however deep.

Source: torch/reference/env-vars.html and torch/compile/about-torch-compile.html in
https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of Neuron SDK 2.33.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nxtrain.common.io.atomic import replace_text, replacing
from nxtrain.tools.compile.entries import NEFF_FOLDER, CacheKey, Entry, EntryState, is_neff
from nxtrain.tools.compile.entry_hashes import Seal, copy_file, damage, from_json, hash_file, to_json


class Neffs:
    """The files of TorchNeuron in a cache.

    Args:
        root: Folder of the cache.
        seals: Folder with the hashes of the files.
    """

    def __init__(self, root: Path, seals: Path) -> None:
        self._root, self._seals = root, seals

    def entries(self, root: Path | None = None) -> Iterator[Entry]:
        """Every file of the cache, or of another folder of its form, sorted by name."""
        base = (root or self._root) / NEFF_FOLDER
        for file in sorted(base.rglob("*.neff")):
            key = CacheKey(NEFF_FOLDER, file.relative_to(base).as_posix())
            if not is_neff(key):
                continue
            entry = _look(file, key)
            if entry is not None:
                yield entry

    def entry(self, key: CacheKey) -> Entry | None:
        """File of a key; None if the cache lacks it."""
        return _look(self.path(key), key)

    def path(self, key: CacheKey) -> Path:
        """Place of a key's file."""
        return self._root / key.compiler / key.module

    def fetch(self, key: CacheKey, target: Path) -> Seal:
        """Copy a file into an empty folder.

        Raises:
            FileNotFoundError: The file is gone.
            ValueError: The file differs from its hash.
        """
        source = self.path(key)
        copied = {source.name: copy_file(source, target / source.name)}
        damaged = damage(self.seal(key), copied)
        if damaged:
            raise ValueError(damaged)
        return copied

    def publish(self, key: CacheKey, staged: Path, seal: Seal) -> bool:
        """Give a staged file its name; False if there is one already."""
        path = self.path(key)
        if path.exists():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write_seal(key, seal)
        with replacing(path, durable=True, shared=True) as draft:
            draft.hardlink_to(staged / path.name)
        return True

    def hash(self, key: CacheKey) -> Seal:
        """Hash of a file as it is."""
        path = self.path(key)
        return {path.name: hash_file(path)}

    def seal(self, key: CacheKey) -> Seal | None:
        """Hash that a file had when it was sealed; None if it was not."""
        try:
            return from_json(json.loads(self._seal(key).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        """Keep the hash of a file."""
        path = self._seal(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(to_json(seal)), durable=False, shared=True)

    def forget(self, key: CacheKey) -> None:
        """Drop the hash of a file that was moved away."""
        self._seal(key).unlink(missing_ok=True)

    def _seal(self, key: CacheKey) -> Path:
        return self._seals / f"{key.module}.json"


def _look(file: Path, key: CacheKey) -> Entry | None:
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    state, detail = EntryState.DONE, ""
    if not stat.st_size:
        state, detail = EntryState.FAILED, "the file is empty"
    return Entry(key, file, state, stat.st_size, max(stat.st_mtime, stat.st_atime), detail)
