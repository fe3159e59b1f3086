"""Checks of the run's folder, its disk space and crash loops before the first step, and records of the start."""

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
"""Earliest plausible time, 2025-01-01; a clock that shows an earlier time is not set."""

TOLERATED_S = 7 * 86400.0
"""Seconds by which a clock that ran ahead may lag behind the run's files; an unset clock lags by years."""


def check_folder(folder: Path) -> None:
    """Check that the run's folder is writable and that the machine's clock is set; called on the leader."""
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
        raise BackendError(f"the clock of this machine says {shown}, but run.dir={folder} was written {there}; set it")


def checkpoint_bytes(state: TrainState) -> int:
    """Bytes of a checkpoint of the whole model: weights and optimizer state."""
    per_param = 0
    for tensors in shards_of(state).values():
        sizes = [tensor.element_size() for tensor in tensors.values()]
        per_param += max(sizes, default=0)
    return per_param * state.num_params


def check_space(folder: Path, state: TrainState) -> None:
    """Check that the run's disk has room for its next checkpoint; called on the leader."""
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes(state)
    # File systems of clusters may report a size of 0.
    if os.statvfs(folder).f_blocks and free < needed:
        raise CheckpointError(
            f"run.dir={folder} has {size(free)} free, and one checkpoint takes {size(needed)}. Free "
            "disk space, use another run.dir, or set checkpoint.every=0"
        )


def prepare_folder(context: RunContext, state: TrainState) -> None:
    """Tidy the run's folder, check its space, and write the configuration; called once the start is accepted."""
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
    """Write the environment of this start to the run's folder, replacing that of an earlier start."""
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
    """Fingerprint of a configuration, given as text."""
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def refuse_crash_loop(logs: Path, config: str, most: int) -> None:
    """Refuse to start a run that has failed too often at the same step.

    Args:
        logs: Folder of the run's logs.
        config: Fingerprint of the configuration; failures under another configuration do not count.
        most: Number of consecutive failures at one step that is refused; 0 to never refuse.

    Raises:
        CrashLoopError: The last `most` starts failed at the same step with this configuration.
    """
    if not most:
        return
    last = failures(read(logs))[-most:]
    if len(last) < most or {(start.spent.step, start.config) for start in last} != {(last[-1].spent.step, config)}:
        return
    why = last[-1].why or "no message, as if the process was killed"
    raise CrashLoopError(
        f"the last {most} starts of this run all failed after step {last[-1].spent.step}; the last error was: {why}. "
        f"Another start would likely fail there too, and is refused (recovery.max_same_step={most}). Fix the cause, "
        f"and change the configuration, set recovery.max_same_step=0, or delete {logs / STARTS_FILE}"
    )


def failures(starts: Sequence[RunStart]) -> list[RunStart]:
    """Failed starts since the last start that finished or was stopped on request."""
    failed: list[RunStart] = []
    for start in starts:
        if start.stop or start.outcome in {"done", "stopped"}:
            failed = []
        else:
            failed.append(start)
    return failed
