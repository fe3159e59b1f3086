"""Where checkpoints lie and what makes one: names, discovery, the commit by rename, retention."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nxtrain.errors import CheckpointError

META = "meta.json"
TOKENIZER = "tokenizer.json"
FOLDER = "checkpoints"

_COMMITTED = re.compile(r"step-\d{8,}")
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|old)")

T = TypeVar("T")


def step_path(directory: Path, step: int) -> Path:
    """Folder of the checkpoint of one step inside a `checkpoints` folder."""
    return directory / f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether this folder is a complete checkpoint: `meta.json` is written last."""
    return (path / META).is_file()


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a `checkpoints` folder, oldest first; empty if there is no such folder."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest(directory: Path) -> Path | None:
    """The last complete checkpoint of a `checkpoints` folder."""
    return next(reversed(list_checkpoints(directory)), None)


def resolve(path: Path) -> Path:
    """Find the checkpoint meant by a path: itself, or the newest of a `checkpoints` folder or of a run folder.

    Raises:
        CheckpointError: There is none.
    """
    if is_checkpoint(path):
        return path
    found = newest(path) or newest(path / FOLDER)
    if found is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint; give a folder with {META}, a {FOLDER} folder or a run folder"
        )
    return found


def staging(path: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return path.with_name(path.name + ".tmp")


def prepare(path: Path) -> None:
    """Make an empty staging folder for `path`, and remove what broken attempts left beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leftovers = [p for p in path.parent.iterdir() if _LEFTOVER.fullmatch(p.name) or p == staging(path)]
    for leftover in leftovers:
        shutil.rmtree(leftover)
    staging(path).mkdir()


def discard(path: Path) -> None:
    """Remove what was staged for `path`; on a disk in trouble as much of it as possible."""
    shutil.rmtree(staging(path), ignore_errors=True)


def publish(path: Path) -> None:
    """Give a staged folder its name, in one step for whoever looks; a folder that had it before is replaced."""
    sync_folder(staging(path))
    old = _set_aside(path) if path.exists() else None
    staging(path).rename(path)
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old)


def doomed(checkpoints: Sequence[T], keep: int) -> Sequence[T]:
    """Those of some checkpoints, oldest first, that make room when only the last `keep` stay; 0 keeps all."""
    return checkpoints[:-keep] if keep else ()


def prune(directory: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints of a `checkpoints` folder; 0 keeps all."""
    for path in doomed(list_checkpoints(directory), keep):
        shutil.rmtree(_set_aside(path))


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file and wait until the disk holds it."""
    write(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk holds the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> Path:
    # A folder dies by rename first: cut off halfway, a plain delete would leave one that still looks complete.
    return path.rename(path.with_name(path.name + ".old"))
