"""Cache layout of TorchNeuron's graphs: one file for each graph, `neff/<ab>/<cd>/<hash>.neff`.

The hash is that of the graph's input. TorchNeuron writes a file under another name and then renames it. So a file is
always complete, on network file systems too. TorchNeuron's locks are elsewhere, and end with their process. AWS's pages
name the folder's variable, but not the layout below the folder. So every `.neff` file counts, at any depth.

Source: torch/reference/env-vars.html and torch/compile/about-torch-compile.html in
https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of Neuron SDK 2.33.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from pathlib import Path

from nxtrain.common.io.atomic import replace_text, sync_folder
from nxtrain.tools.compile.entries import (
    NEFF_FOLDER,
    CacheKey,
    CacheLayout,
    Entry,
    EntryState,
    Seal,
    parse_key,
    read_record,
    to_json,
)


class NeffFiles(CacheLayout):
    """Cache layout of TorchNeuron: one file for each compiled graph, with file hashes in a separate folder."""

    def __init__(self, root: Path, seals: Path) -> None:
        super().__init__(root)
        self._seals = seals

    def scan(self, root: Path) -> Iterator[Entry]:
        base = root / NEFF_FOLDER
        for file in sorted(base.rglob("*.neff")):
            key = parse_key(f"{NEFF_FOLDER}/{file.relative_to(base).as_posix()}")
            if key is None:
                continue
            entry = self.look(file, key)
            if entry is not None:
                yield entry

    def look(self, path: Path, key: CacheKey) -> Entry | None:
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        state, detail = EntryState.DONE, ""
        if not stat.st_size:
            state, detail = EntryState.FAILED, "the file is empty"
        return Entry(key, path, state, stat.st_size, max(stat.st_mtime, stat.st_atime), detail)

    def files(self, key: CacheKey) -> list[Path]:
        return [self.path(key)]

    def read_seal(self, key: CacheKey) -> Seal | None:
        return read_record(self._seal(key), "inode", self.path(key).stat().st_ino)

    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        self._write_seal(key, seal, self.path(key))

    def publish(self, staged: Path, key: CacheKey, seal: Seal) -> bool:
        path = self.path(key)
        try:
            path.hardlink_to(staged / path.name)
        except FileExistsError:  # a rank has compiled it just now
            return False
        self._write_seal(key, seal, staged / path.name)
        sync_folder(path.parent)
        return True

    def move(self, path: Path, key: CacheKey, target: Path) -> bool:
        """Move a graph's file; a process that has the file open can read it to the end."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if path == self.path(key):
            self._seal(key).unlink(missing_ok=True)
        try:
            path.rename(target)
        except FileNotFoundError:
            return False
        return True

    def begun(self) -> Iterator[tuple[CacheKey, Hashable]]:
        """Yield all compiled files of the cache, since a file appears only when its compilation has ended."""
        for entry in self.scan(self.root):
            if entry.state is EntryState.DONE:
                yield entry.key, None

    def _write_seal(self, key: CacheKey, seal: Seal, file: Path) -> None:
        """Write the seal (hash) of a file, bound to the file's inode; a file that replaces it later has no seal."""
        path = self._seal(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"inode": file.stat().st_ino, "files": to_json(seal)}
        replace_text(path, json.dumps(record), durable=False, shared=True)

    def _seal(self, key: CacheKey) -> Path:
        return self._seals / f"{key.module}.json"
