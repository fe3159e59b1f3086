"""Folder `checkpoints` of a run: names, discovery, atomic commit by rename, quarantine and retention."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.atomic import sync_folder, write_durably
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LATEST_FILE

META = "meta.json"
MANIFEST = "manifest.json"
VERIFIED = "verified"
"""Name of the empty file that marks a checkpoint as verified: read back from the disk without a difference."""
LATEST = LATEST_FILE
"""File with the name of the newest checkpoint, for people and scripts; resume lists the folder instead."""

MIN_VERIFIED = 2
"""Number of the newest verified checkpoints that are never deleted."""

_COMMITTED = re.compile(r"step-\d{8,}")
_TEMPORARY = re.compile(r"(tmp|old)-\w+")
"""Suffix of a checkpoint folder's name: `tmp` during writing or deletion, `old` during replacement."""
_CORRUPT = re.compile(r"step-\d{8,}\.corrupt(-\d+)?")
_OWN = re.compile(r"step-\d{8,}(\.(corrupt|abandoned)[\w.-]*|\.tmp-\w+)?")
"""Folder names that this module creates, except `old`, which remains only after an interrupted replacement."""


@dataclass(frozen=True)
class Retention:
    """Retention rule: the checkpoints that are kept.

    Args:
        keep: Number of newest checkpoints to keep; 0 for all.
        keep_every: Also keep steps that are multiples of this number; 0 for none.
    """

    keep: int = 0
    keep_every: int = 0


def step_path(directory: Path, step: int) -> Path:
    """Path of the checkpoint of a step in a `checkpoints` folder."""
    return directory / f"step-{step:08d}"


def step_names(steps: Iterable[int]) -> str:
    """Comma-separated checkpoint names of steps, for messages."""
    return ", ".join(step_path(Path(), step).name for step in steps)


def is_checkpoint(path: Path) -> bool:
    """True if a folder is a complete checkpoint: it has `meta.json`, which is written last."""
    return (path / META).is_file()


def list_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints of a `checkpoints` folder, oldest first; empty if the folder does not exist."""
    if not directory.is_dir():
        return []
    checkpoints = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and is_checkpoint(path)]
    return sorted(checkpoints, key=step_of)


def incomplete(directory: Path) -> list[Path]:
    """List folders and links with the name of a checkpoint but without `meta.json`, oldest first.

    A write gives a folder this name only once the folder is complete, so something else removed the file.
    """
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and not is_checkpoint(path)]
    return sorted(paths, key=step_of)


def remnants(directory: Path) -> list[str]:
    """List names in a `checkpoints` folder that show that checkpoints were lost.

    Such names are the record of a missing newest checkpoint, files of a checkpoint outside its folder, and renamed
    checkpoint folders. Quarantined and abandoned checkpoints, and drafts of a killed write, do not count.
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
    """True if the recorded newest checkpoint is lost: neither present, nor quarantined, nor abandoned."""
    try:
        name = read_text(latest, errors="replace").strip()
    except OSError:
        return True
    return not _COMMITTED.fullmatch(name) or not [*latest.parent.glob(f"{name}*")]


def newest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a `checkpoints` folder; None if there is none."""
    return next(reversed(list_checkpoints(directory)), None)


def find_checkpoint(path: Path) -> Path:
    """Find a checkpoint: the path itself, or the newest checkpoint of a `checkpoints` folder or run folder.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
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
    """Names of incomplete and quarantined checkpoints that are newer than a complete checkpoint."""
    folder = checkpoint.parent
    if not _COMMITTED.fullmatch(checkpoint.name):
        return []
    unusable = [*incomplete(folder), *quarantined(folder)]
    return sorted(path.name for path in unusable if step_of(path) > step_of(checkpoint))


def step_of(path: Location) -> int:
    """Step number of a checkpoint, from its name; suffixes such as `.corrupt` are ignored."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def draft_of(path: Path) -> Path:
    """Return a new path for the draft of a checkpoint, which `publish` renames to `path`.

    Each call returns another name, so a writer that is still alive by mistake cannot disturb a later writer.
    """
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def prepare(path: Path, staged: Path | None = None) -> Path:
    """Create an empty draft folder for a checkpoint, and delete drafts of interrupted writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path.parent, path.name)
    staged = staged or draft_of(path)
    staged.mkdir()
    return staged


def clear(directory: Path, target: str = "") -> None:
    """Delete drafts of interrupted writes, and restore folders whose replacement was interrupted.

    Args:
        directory: Folder `checkpoints`.
        target: Name of a folder whose drafts are also deleted, if it is not the name of a checkpoint.
    """
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
    """Delete a folder, or a link to one without its target.

    Errors of a failing disk are ignored, and as many files as possible are deleted.
    """
    if staged.is_symlink():
        with suppress(OSError):
            staged.unlink()
        return
    shutil.rmtree(staged, ignore_errors=True)


def publish(staged: Path, path: Path) -> None:
    """Commit a draft: rename the folder to its final name atomically, and replace an older folder of that name."""
    sync_folder(staged)
    old = None
    if path.exists():
        old = _set_aside(path, "old")
    staged.rename(path)
    sync_folder(path.parent)
    if old is not None:
        discard(old)


def point_to(path: Path) -> None:
    """Record a checkpoint as the newest in the file `latest`, atomically."""
    draft = path.with_name(f".{LATEST}")
    write_durably(draft, lambda file: file.write_text(path.name + "\n"))
    draft.replace(path.with_name(LATEST))


def quarantine(path: Path) -> Path:
    """Quarantine a damaged checkpoint: rename its folder so that no run resumes from it; return the new path."""
    return _add_suffix(path, "corrupt")


def abandon(directory: Path, after: int, *, damaged: bool = False) -> list[int]:
    """Rename the checkpoints after a step as abandoned, since the run resumes at that step and reuses their names.

    Args:
        directory: Folder `checkpoints`.
        after: Step at which the run resumes.
        damaged: Also rename quarantined checkpoints after the step.

    Returns:
        Steps of the abandoned checkpoints, without quarantined checkpoints.
    """
    # Incomplete checkpoints too, since a new checkpoint of the step would replace them.
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
    """List the quarantined checkpoints of a `checkpoints` folder."""
    return sorted(path for path in directory.glob("step-*") if _CORRUPT.fullmatch(path.name))


def mark_verified(path: Path) -> None:
    """Mark a checkpoint as verified: read back from the disk and undamaged."""
    (path / VERIFIED).touch()


def steps_to_delete(steps: list[int], verified: Container[int], retention: Retention) -> set[int]:
    """Return the steps whose checkpoints retention deletes; `steps` must be ascending."""
    whole = [step for step in steps if step in verified]
    stay = {*steps[-retention.keep :], *whole[-MIN_VERIFIED:]}
    every = retention.keep_every
    return {step for step in steps if step not in stay and not (every and step % every == 0)}


def prune(directory: Path, retention: Retention, in_use: Container[int] = ()) -> None:
    """Delete the checkpoints that the retention rule does not keep, except checkpoints in use.

    Args:
        directory: Folder `checkpoints`.
        retention: Retention rule.
        in_use: Steps of checkpoints that must stay, such as those being uploaded.
    """
    checkpoints = {step_of(path): path for path in list_checkpoints(directory)}
    verified = {step for step, path in checkpoints.items() if (path / VERIFIED).exists()}
    for step in sorted(steps_to_delete([*checkpoints], verified, retention)):
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
    # Renamed before deletion, since an interrupted deletion would leave a folder that looks complete. The new name is
    # unique, and `clear` recognizes it.
    return path.rename(path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}"))
