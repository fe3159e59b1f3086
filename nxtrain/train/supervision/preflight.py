"""What would end a run only after hours is looked for before its first step."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from nxtrain.errors import BackendError, CheckpointError
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState

BUILT = 1735689600.0
"""2025-01-01: no clock that is set shows less."""

TOLERATED_S = 7 * 86400.0
"""A clock may have jumped a day ahead, and been set back since; one that is not set is years behind."""


def check_folder(folder: Path) -> None:
    """Hold the folder of a run, and the clock, to what a run needs; on the leader.

    Raises:
        BackendError: The clock is not set.
        CheckpointError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise CheckpointError(f"run.dir={folder} cannot be written: {error}. Use another run.dir") from error
    # What this start has made itself, such as its lock, is as young as its clock says.
    now, written = time.time(), max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
    if now < BUILT or now < written - TOLERATED_S:
        shown, there = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in (now, written))
        raise BackendError(f"the clock of this machine says {shown}, and run.dir={folder} was written {there}; set it")


def checkpoint_bytes(state: TrainState) -> int:
    """What one checkpoint of the whole model takes: weights, and the optimizer's state."""
    per_param = 0
    for tensors in shards_of(state).values():
        sizes = [tensor.element_size() for tensor in tensors.values()]
        per_param += max(sizes, default=0)
    return per_param * state.num_params


def check_space(folder: Path, state: TrainState) -> None:
    """Hold the disk of a run to what its next checkpoint takes; on the leader.

    Raises:
        CheckpointError: There is less.
    """
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes(state)
    # File systems of clusters may tell no size at all.
    if os.statvfs(folder).f_blocks and free < needed:
        raise CheckpointError(
            f"run.dir={folder} has {free / 1e9:.2f} GB free, and one checkpoint takes {needed / 1e9:.2f} GB. Free "
            "some, use another run.dir, or checkpoint.every=0"
        )
