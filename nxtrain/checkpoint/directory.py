"""The `checkpoints` folder: names, discovery, the commit by rename, quarantine, retention."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.atomic import sync_folder, write_durably
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LATEST_FILE

META = "meta.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
VERIFIED = "verified"
"""Empty file; marks a checkpoint that was read back from the disk and equals the bytes written."""
LATEST = LATEST_FILE
"""File with the name of the newest checkpoint, for people and scripts; no start relies on it."""

MIN_VERIFIED = 2
"""Number of the newest verified checkpoints that are never deleted."""

_COMMITTED = re.compile(r"step-\d{8,}")
_TEMPORARY = re.compile(r"(tmp|old)-\w+")
"""Suffix of a folder's name: `tmp` while it is written or deleted, `old` while it is replaced."""
_CORRUPT = re.compile(r"step-\d{8,}\.corrupt(-\d+)?")
_OWN = re.compile(r"step-\d{8,}(\.(corrupt|abandoned)[\w.-]*|\.tmp-\w+)?")
"""Names that this module gives to folders, without `old`, which stays only after an interrupted replacement."""


@dataclass(frozen=True)
class Retention:
    """Number and steps of the checkpoints that stay.

    Args:
        keep: Number of the newest checkpoints that stay; 0: all.
        keep_every: Steps that are multiples of this number stay; 0: no step stays for this reason.
    """

    keep: int = 0
    keep_every: int = 0


def step_path(directory: Path, step: int) -> Path:
    """Folder of the checkpoint of one step inside a `checkpoints` folder."""
    return directory / f"step-{step:08d}"


def step_names(steps: Iterable[int]) -> str:
    """Names of the checkpoints of some steps, as text for a message."""
    return ", ".join(step_path(Path(), step).name for step in steps)


def is_checkpoint(path: Path) -> bool:
    """True if a folder is a complete checkpoint: `meta.json` is written last."""
    return (path / META).is_file()


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints of a `checkpoints` folder, oldest first; empty if the folder does not exist."""
    if not directory.is_dir():
        return []
    checkpoints = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and is_checkpoint(path)]
    return sorted(checkpoints, key=step_of)


def incomplete(directory: Path) -> list[Path]:
    """Folders and links that have the name of a checkpoint, but no `meta.json`, oldest first.

    A write gives a folder this name only when the folder is complete, so something else removed the file.
    """
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and not is_checkpoint(path)]
    return sorted(paths, key=step_of)


def remnants(directory: Path) -> list[str]:
    """Names in a `checkpoints` folder that prove that checkpoints of the folder are gone.

    Such names are the record of the newest checkpoint, files of a checkpoint outside its folder, and unknown names of
    folders. Quarantined and abandoned checkpoints, and drafts of a killed write, do not count.
    """
    names: list[str] = []
    if not directory.is_dir():
        return names
    for path in sorted(directory.iterdir()):
        is_file = path.name in {META, MANIFEST} or path.suffix == ".safetensors"
        is_renamed = path.name.startswith("step-") and not _OWN.fullmatch(path.name)
        if is_file or is_renamed or (path.name == LATEST and _names_lost(path)):
            names.append(path.name)
    return names


def _names_lost(latest: Path) -> bool:
    """True if the record of the newest checkpoint names one that is not present, quarantined or abandoned."""
    try:
        name = read_text(latest, errors="replace").strip()
    except OSError:
        return True
    return not _COMMITTED.fullmatch(name) or not [*latest.parent.glob(f"{name}*")]


def newest(directory: Path) -> Path | None:
    """Newest complete checkpoint of a `checkpoints` folder; None if the folder has none."""
    return next(reversed(list_checkpoints(directory)), None)


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint of a path: the path itself, or the newest one of a `checkpoints` folder or run folder."""
    if is_checkpoint(path):
        return path
    checkpoint = newest(path) or newest(path / CHECKPOINTS_DIR)
    if checkpoint is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint; give a folder with {META}, "
            f"a {CHECKPOINTS_DIR} folder or a run folder"
        )
    return checkpoint


def newer_unusable(checkpoint: Path) -> list[str]:
    """Names of folders newer than a complete checkpoint that are incomplete or quarantined."""
    folder = checkpoint.parent
    if not _COMMITTED.fullmatch(checkpoint.name):
        return []
    unusable = [*incomplete(folder), *quarantined(folder)]
    return sorted(path.name for path in unusable if step_of(path) > step_of(checkpoint))


def step_of(path: Location) -> int:
    """Step of a checkpoint in a `checkpoints` folder or a mirror; suffixes such as `.corrupt` are ignored."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def draft_of(path: Path) -> Path:
    """New name for the draft of a folder that `publish` renames to `path`.

    Each call returns another name, so that a writer that was wrongly believed dead disturbs no other.
    """
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def prepare(path: Path, staged: Path | None = None) -> Path:
    """Make an empty draft folder, and clean up after broken attempts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path.parent, path.name)
    staged = staged or draft_of(path)
    staged.mkdir()
    return staged


def clear(directory: Path, target: str = "") -> None:
    """Remove drafts of broken attempts in a `checkpoints` folder, or those of a target; restore replaced folders."""
    if not directory.is_dir():
        return
    for left in sorted(directory.iterdir()):
        name, _, rest = left.name.rpartition(".")
        if not _TEMPORARY.fullmatch(rest) or not (name == target or _COMMITTED.fullmatch(name)):
            continue
        if rest.startswith("old-") and not left.with_name(name).exists():
            left.rename(left.with_name(name))
        else:
            discard(left)


def discard(staged: Path) -> None:
    """Remove a folder; on a failing disk, remove as many files as possible."""
    shutil.rmtree(staged, ignore_errors=True)


def publish(staged: Path, path: Path) -> None:
    """Rename a draft to its final name, atomically; an older folder of the name is replaced."""
    sync_folder(staged)
    old = None
    if path.exists():
        old = _set_aside(path, "old")
    staged.rename(path)
    sync_folder(path.parent)
    if old is not None:
        discard(old)


def point_to(path: Path) -> None:
    """Record a checkpoint as the newest of its folder, atomically."""
    draft = path.with_name(f".{LATEST}")
    write_durably(draft, lambda file: file.write_text(path.name + "\n"))
    draft.replace(path.with_name(LATEST))


def quarantine(path: Path) -> Path:
    """Quarantine a damaged checkpoint: rename the folder so that no start resumes from it; return the new path."""
    return _add_suffix(path, "corrupt")


def abandon(directory: Path, after: int, *, damaged: bool = False) -> list[int]:
    """Rename the checkpoints after a step as abandoned: the run resumes at that step, and writes the names again.

    With `damaged`, quarantined checkpoints too, since they belong to the abandoned part of the run. Return the steps of
    the others.
    """
    # The new checkpoint of its step would replace an incomplete one.
    later = [path for path in (*list_checkpoints(directory), *incomplete(directory)) if step_of(path) > after]
    renamed = list(later)
    if damaged:
        renamed += [path for path in quarantined(directory) if step_of(path) > after]
    for path in renamed:
        _add_suffix(path, "abandoned")
    if renamed:
        left = newest(directory)
        if left is None:
            (directory / LATEST).unlink(missing_ok=True)
        else:
            point_to(left)
    return [step_of(path) for path in later]


def quarantined(directory: Path) -> list[Path]:
    """Quarantined checkpoints of a `checkpoints` folder."""
    return sorted(path for path in directory.glob("step-*") if _CORRUPT.fullmatch(path.name))


def mark_verified(path: Path) -> None:
    """Mark a checkpoint as read back and undamaged."""
    (path / VERIFIED).touch()


def doomed(steps: list[int], verified: Container[int], retention: Retention) -> set[int]:
    """Steps that retention deletes; `steps` has the oldest first."""
    whole = [step for step in steps if step in verified]
    stay = {*steps[-retention.keep :], *whole[-MIN_VERIFIED:]}
    every = retention.keep_every
    return {step for step in steps if step not in stay and not (every and step % every == 0)}


def prune(directory: Path, retention: Retention, in_use: Container[int] = ()) -> None:
    """Delete the checkpoints of a `checkpoints` folder that retention does not keep."""
    checkpoints = {step_of(path): path for path in list_checkpoints(directory)}
    verified = {step for step, path in checkpoints.items() if (path / VERIFIED).exists()}
    for step in sorted(doomed([*checkpoints], verified, retention)):
        if step not in in_use:
            discard(_set_aside(checkpoints[step], "tmp"))


def _add_suffix(path: Path, suffix: str) -> Path:
    renamed = path.with_name(f"{path.name}.{suffix}")
    number = 0
    while renamed.exists():
        number += 1
        renamed = path.with_name(f"{path.name}.{suffix}-{number}")
    return path.rename(renamed)


def _set_aside(path: Path, kind: str) -> Path:
    # Renamed before it is deleted: an interrupted plain delete would leave a folder that still looks complete. The new
    # name is unique, and `clear` recognizes it.
    return path.rename(path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}"))
