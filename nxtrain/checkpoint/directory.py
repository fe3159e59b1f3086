"""Where checkpoints lie and what makes one: names, discovery, the commit by rename, quarantine, retention."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Container
from pathlib import Path

from nxtrain.errors import CheckpointError
from nxtrain.io.atomic import sync_folder, write_durably
from nxtrain.run_folder import CHECKPOINTS_DIR

META = "meta.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
VERIFIED = "verified"
"""Empty; says that what the disk held was read back, and was what had been written."""
LATEST = "latest"
"""Names the newest checkpoint for people and scripts; nothing here relies on it."""

MIN_VERIFIED = 2
"""So many of the newest verified checkpoints are never deleted."""

_COMMITTED = re.compile(r"step-\d{8,}")
_ASIDE = re.compile(r"(tmp|old)-\w+")
"""What becomes of a name while a folder is written or deleted, and while it is replaced."""
_CORRUPT = re.compile(r"step-\d{8,}\.corrupt(-\d+)?")


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
    return sorted(found, key=step_of)


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
    found = newest(path) or newest(path / CHECKPOINTS_DIR)
    if found is None:
        raise CheckpointError(
            f"{path} holds no complete checkpoint; give a folder with {META}, "
            f"a {CHECKPOINTS_DIR} folder or a run folder"
        )
    return found


def step_of(path: Path) -> int:
    """The step of a checkpoint in a `checkpoints` folder."""
    return int(path.name.removeprefix("step-"))


def draft_of(path: Path) -> Path:
    """A new name for a folder in which to write what `publish` gives the name `path`.

    It is another one each time: a writer that was thought dead disturbs nobody.
    """
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def prepare(path: Path, staged: Path | None = None) -> Path:
    """Make an empty folder of a name that `draft_of` gave, by default a new one; removes what broken attempts left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path.parent, path.name)
    staged = staged or draft_of(path)
    staged.mkdir()
    return staged


def clear(directory: Path, own: str = "") -> None:
    """Remove what broken attempts left, as much of it as possible, and give its name back to what one was replacing.

    Args:
        directory: A `checkpoints` folder, or one that holds a folder of another name.
        own: That other name.
    """
    for left in sorted(directory.iterdir()) if directory.is_dir() else ():
        name, _, rest = left.name.rpartition(".")
        if not _ASIDE.fullmatch(rest) or not (name == own or _COMMITTED.fullmatch(name)):
            continue
        if rest.startswith("old-") and not left.with_name(name).exists():
            left.rename(left.with_name(name))
        else:
            discard(left)


def discard(staged: Path) -> None:
    """Remove what was staged; on a disk in trouble as much of it as possible."""
    shutil.rmtree(staged, ignore_errors=True)


def publish(staged: Path, path: Path) -> None:
    """Give a staged folder its name, in one step for whoever looks; a folder that had it before is replaced."""
    sync_folder(staged)
    old = _set_aside(path, "old") if path.exists() else None
    staged.rename(path)
    sync_folder(path.parent)
    if old is not None:
        discard(old)


def point_to(path: Path) -> None:
    """Name a checkpoint as the newest of its folder, in one step."""
    draft = path.with_name(f".{LATEST}")
    write_durably(draft, lambda file: file.write_text(path.name + "\n"))
    draft.replace(path.with_name(LATEST))


def quarantine(path: Path) -> Path:
    """Put a damaged checkpoint aside, where nobody takes it for one, and tell its new name."""
    return _put_aside(path, "corrupt")


def abandon(directory: Path, after: int, *, damaged: bool = False) -> list[int]:
    """Put the checkpoints after a step aside, since a run goes on from there and will make others of the same names.

    Args:
        directory: A `checkpoints` folder.
        after: The last step that stays.
        damaged: Also those that were put aside because they are damaged: it is no longer this run that lacks them.

    Returns:
        The steps that were there.
    """
    found = [path for path in list_checkpoints(directory) if step_of(path) > after]
    for path in quarantined(directory) if damaged else ():
        if int(path.name.removeprefix("step-").partition(".")[0]) > after:
            _put_aside(path, "abandoned")
    for path in found:
        _put_aside(path, "abandoned")
    return [step_of(path) for path in found]


def quarantined(directory: Path) -> list[Path]:
    """The checkpoints of a `checkpoints` folder that were put aside because they are damaged."""
    return sorted(path for path in directory.glob("step-*") if _CORRUPT.fullmatch(path.name))


def mark_verified(path: Path) -> None:
    """Note that a checkpoint was read back, and is whole."""
    (path / VERIFIED).touch()


def doomed(checkpoints: list[Path], keep: int, keep_every: int = 0) -> list[Path]:
    """Those of some checkpoints, oldest first, that make room.

    Args:
        checkpoints: All there are.
        keep: So many of the newest stay; 0: all.
        keep_every: Those of steps that are multiples of it stay; 0: none of them for that.
    """
    verified = {step_of(path) for path in checkpoints if (path / VERIFIED).exists()}
    steps = doomed_steps([step_of(path) for path in checkpoints], verified, keep, keep_every)
    return [path for path in checkpoints if step_of(path) in steps]


def doomed_steps(steps: list[int], verified: Container[int], keep: int, keep_every: int = 0) -> set[int]:
    """The same by steps, oldest first, of which some are known to be whole."""
    whole = [step for step in steps if step in verified]
    stay = {*steps[-keep:], *whole[-MIN_VERIFIED:]}
    return {step for step in steps if step not in stay and not (keep_every and step % keep_every == 0)}


def prune(directory: Path, keep: int, keep_every: int = 0) -> None:
    """Delete the checkpoints of a `checkpoints` folder that make room; see `doomed`."""
    for path in doomed(list_checkpoints(directory), keep, keep_every):
        discard(_set_aside(path, "tmp"))


def _put_aside(path: Path, why: str) -> Path:
    number = 0
    while (aside := path.with_name(f"{path.name}.{why}{f'-{number}' if number else ''}")).exists():
        number += 1
    return path.rename(aside)


def _set_aside(path: Path, kind: str) -> Path:
    # A folder dies by rename first: cut off halfway, a plain delete would leave one that still looks complete. The new
    # name is nobody else's, and one that `clear` knows.
    return path.rename(path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}"))
