"""Checks before the first step: a folder that cannot hold the run, a crash loop; and records of the start."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import nxtrain
from nxtrain.checkpoint.directory import Retention, clear, prune
from nxtrain.common.errors import BackendError, CheckpointError, CrashLoopError, refused
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, ENVIRONMENT_FILE, STARTS_FILE
from nxtrain.common.text import size
from nxtrain.config.show import dump
from nxtrain.metrics.goodput import RunStart
from nxtrain.metrics.start_log import read
from nxtrain.train.context import RunContext
from nxtrain.train.start import shards_of
from nxtrain.train.step import TrainState

BUILT = 1735689600.0
"""2025-01-01: a clock that shows less is not set."""

TOLERATED_S = 7 * 86400.0
"""Tolerance for a clock that was ahead and has been set back since; an unset clock is years behind."""


def check_folder(folder: Path) -> None:
    """Check on the leader that the run's folder can be written and that the clock is set."""
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
    """Check on the leader that the disk of a run has room for its next checkpoint."""
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes(state)
    # File systems of clusters may report no size at all.
    if os.statvfs(folder).f_blocks and free < needed:
        raise CheckpointError(
            f"run.dir={folder} has {size(free)} free, and one checkpoint takes {size(needed)}. Free "
            "some, use another run.dir, or checkpoint.every=0"
        )


def prepare_folder(context: RunContext, state: TrainState) -> None:
    """Tidy the run's folder, check its space, and record the configuration; only once the start is not refused."""
    if not context.is_leader:
        return
    config, folder = context.config, context.config.run.dir
    if config.checkpoint.every:
        # The remains of a killed start, and the checkpoints due for deletion, must not fill the disk of this start.
        clear(folder / CHECKPOINTS_DIR)
        prune(folder / CHECKPOINTS_DIR, Retention(config.checkpoint.keep, config.checkpoint.keep_every))
        check_space(folder, state)
    (folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
    _record_environment(folder, context)


def _record_environment(folder: Path, context: RunContext) -> None:
    """Write the environment of this start; an earlier start's is replaced."""
    mesh = context.mesh
    environment = {
        "nxtrain": nxtrain.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "backend": context.backend.name,
        "asynchronous": context.backend.is_asynchronous,
        "ranks": mesh.world,
        "ranks per node": context.backend.local_world,
        "tp": mesh.tp_size,
        "cp": mesh.cp_size,
        "pp": mesh.pp_size,
        "dp": mesh.dp_size,
    }
    replace_text(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n", durable=False)


def fingerprint(config: str) -> str:
    """Fingerprint of a configuration's text."""
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def refuse_crash_loop(logs: Path, config: str, most: int) -> None:
    """Refuse to start a run that has failed too often at the same step.

    Args:
        config: Fingerprint of the configuration; failures under another configuration do not count.
        most: Failures in a row at one step; 0: never refuse.

    Raises:
        CrashLoopError: The last `most` starts failed at the same step with this configuration.
    """
    if not most:
        return
    last = failures(read(logs))[-most:]
    if len(last) < most or {(start.spent.step, start.config) for start in last} != {(last[-1].spent.step, config)}:
        return
    why = last[-1].why or "it said nothing, as if killed"
    raise CrashLoopError(
        f"the last {most} attempts of this run all ended after step {last[-1].spent.step}; of the last one is known: "
        f"{why}. A further one would likely end there too (recovery.max_same_step={most}). Mend the cause and "
        f"start again with another configuration, with recovery.max_same_step=0, or without {logs / STARTS_FILE}"
    )


def failures(starts: Sequence[RunStart]) -> list[RunStart]:
    """Starts since the last one that ended with `done` or was asked to stop."""
    failed: list[RunStart] = []
    for start in starts:
        if start.stop or start.outcome in {"done", "stopped"}:
            failed = []
        else:
            failed.append(start)
    return failed
