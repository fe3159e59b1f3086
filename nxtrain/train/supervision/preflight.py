"""Checks before the first step for problems that would end a run hours later: folder, clock and disk space."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from nxtrain.common.errors import BackendError, CheckpointError, refused
from nxtrain.common.text import size
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState

BUILT = 1735689600.0
"""2025-01-01: a clock that shows less is not set."""

TOLERATED_S = 7 * 86400.0
"""Tolerance for a clock that was ahead and has been set back since; an unset clock is years behind."""


def check_folder(folder: Path) -> None:
    """Check on the leader that the run's folder can be written and that the clock is set.

    Raises:
        BackendError: The clock is not set, or the rights are missing.
        InputError: A file is in the way.
        StorageError: The storage fails or is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise refused(error, f"run.dir={folder} cannot be written") from error
    # A file that this start created itself, such as its lock, is stamped with the same clock.
    now, written = time.time(), max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
    if now < BUILT or now < written - TOLERATED_S:
        shown, there = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in (now, written))
        raise BackendError(f"the clock of this machine says {shown}, and run.dir={folder} was written {there}; set it")


def checkpoint_bytes(state: TrainState) -> int:
    """Size in bytes of one checkpoint of the whole model: weights and optimizer state."""
    per_param = 0
    for tensors in shards_of(state).values():
        sizes = [tensor.element_size() for tensor in tensors.values()]
        per_param += max(sizes, default=0)
    return per_param * state.num_params


def check_space(folder: Path, state: TrainState) -> None:
    """Check on the leader that the disk of a run has room for its next checkpoint.

    Raises:
        CheckpointError: The free space is less than one checkpoint.
    """
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes(state)
    # File systems of clusters may report no size at all.
    if os.statvfs(folder).f_blocks and free < needed:
        raise CheckpointError(
            f"run.dir={folder} has {size(free)} free, and one checkpoint takes {size(needed)}. Free "
            "some, use another run.dir, or checkpoint.every=0"
        )
