"""Benchmark of checkpoint speed, compared with the raw disk, `torch.save` and `torch.distributed.checkpoint`.

The disk's speed is measured by writing and reading one buffer in blocks, without the page cache. Results are medians
over rounds. Ratios are medians of the ratios inside each round, since other programs use the disk too.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table
from torch import Tensor

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import read_back, write
from nxtrain.checkpoint.staging import Staging
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.io.checksummed_file import BLOCK_BYTES
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.tools.bench import harness

ALONE = StorageScope(Ranks(Mesh(1, 0)))

KINDS = ("model", "exp_avg", "exp_avg_sq")
ROWS = 1024  # rows and columns of each float32 tensor, which has 4 MiB
MATRICES_MIB = 4 * len(KINDS)  # MiB of one tensor of each kind

DISK_WRITE = "disk, write"
DISK_READ = "disk, read"
COPY = "copy of the state"
SAVE = "save"
READ_BACK = "read back"
STALL = "stall"
LOAD = "load"
TORCH_SAVE, TORCH_LOAD = "torch.save", "torch.load"
DCP_SAVE, DCP_LOAD = "DCP, save", "DCP, load"
FLOORS = {
    **dict.fromkeys((SAVE, TORCH_SAVE, DCP_SAVE), DISK_WRITE),
    **dict.fromkeys((READ_BACK, LOAD, TORCH_LOAD, DCP_LOAD), DISK_READ),
    STALL: COPY,
}
"""Reference operation for each measured operation: the raw disk's write or read, or a copy in memory."""


TARGETS = {SAVE: 0.9, STALL: 1 / 1.3, LOAD: 0.8}  # least share of the reference's speed, for each measurement


def bench_checkpoint(*, folder: Path, mib: int, rounds: int, check: bool, as_json: bool) -> bool:
    """Measure checkpoint operations in a subfolder of `folder`, and print the results.

    Returns:
        False if `check` is set and an operation was slower than its target in `TARGETS`.
    """
    mib = MATRICES_MIB * max(1, mib // MATRICES_MIB)
    scratch = folder / f"nxtrain-bench-{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        seconds = measure(scratch, mib, rounds)
    finally:
        shutil.rmtree(scratch)
    result = summarize(seconds, mib)
    missed = {name: TARGETS[name] for name in TARGETS if result[name]["share"] < TARGETS[name]}
    rows = []
    for name, turns in seconds.items():
        rows.append(harness.row(name, "GiB/s", [mib / 1024 / turn for turn in turns]))
    document = {
        "machine": harness.machine(),
        "mib": mib,
        "rounds": rounds,
        "rows": rows,
        "ratios": {name: figures["share"] for name, figures in result.items()},
        "results": result,
        "missed": missed,
    }
    harness.present(document, lambda: [_table(result, mib, rounds)], as_json=as_json, of_machine=False)
    return not (check and missed)


def summarize(seconds: Mapping[str, Sequence[float]], mib: int) -> dict[str, dict[str, float]]:
    """Median GiB per second of each operation, and its speed as a share of the reference operation's speed."""
    result = {}
    for name, turns in seconds.items():
        floor = seconds[FLOORS.get(name, name)]
        result[name] = {"gib_per_s": mib / 1024 / median(turns), "share": harness.median_ratio(floor, turns)}
    return result


def measure(folder: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each checkpoint operation in every round, by operation name."""
    state = FilledState(folder, mib)
    turns: dict[str, Callable[[], object]] = {
        COPY: state.copy,  # begins a round: the files of the previous round are deleted before it
        STALL: state.stage,
        DISK_WRITE: state.write_raw,
        SAVE: state.save,
        READ_BACK: state.read_back,
        TORCH_SAVE: state.torch_save,
        DCP_SAVE: state.dcp_save,
        DISK_READ: state.read_raw,
        LOAD: state.load,
        TORCH_LOAD: state.torch_load,
        DCP_LOAD: state.dcp_load,
    }
    # The first round maps memory, and does not count.
    return harness.take_turns({name: partial(state.seconds, act) for name, act in turns.items()}, rounds)


class FilledState:
    """Training state of a model of matrices only, with one method for each measured operation."""

    def __init__(self, folder: Path, mib: int) -> None:
        self._folder = folder
        num = max(1, mib // MATRICES_MIB)
        specs = {f"layers.{index}.weight": ShardSpec((ROWS, ROWS), dim=0) for index in range(num)}
        self._layout = Layout(ParamTable(specs), Mesh(1, 0))
        shards: dict[str, dict[str, Tensor]] = {}
        flat: dict[str, Tensor] = {}
        for kind in KINDS:
            shards[kind] = {name: torch.randn(ROWS, ROWS) for name in specs}
            flat |= {f"{kind}/{name}": x for name, x in shards[kind].items()}
        self._shards, self._flat = shards, flat
        self._into = {key: torch.empty_like(x) for key, x in self._flat.items()}
        self._staging = Staging(self._layout)
        self._staged = self._staging.fill(self._shards)
        self._block = mmap.mmap(-1, BLOCK_BYTES)
        self._num_blocks = max(1, sum(x.nbytes for x in flat.values()) // BLOCK_BYTES)
        self._meta = Meta(step=1, samples=1, tokens=1, seed=0, family="none", config={}, dtype="float32")

    def seconds(self, act: Callable[[], object]) -> float:
        """Time one operation in seconds, with a cold page cache.

        The operation `copy` begins a round, so the files of the previous round are deleted before it.
        """
        if act == self.copy:  # deletion is not timed, since a run's checkpoint replaces no other
            for file in self._folder.iterdir():
                if file.is_dir():
                    shutil.rmtree(file)
                else:
                    file.unlink()
        os.sync()
        for file in self._folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    def copy(self) -> None:
        for key, x in self._flat.items():
            self._into[key].copy_(x)

    def stage(self) -> None:
        """Copy the tensors into the staging buffers, the only part of a save that training waits for."""
        self._staging.fill(self._shards)

    def write_raw(self) -> None:
        file = os.open(self._folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
        for index in range(self._num_blocks):
            os.pwrite(file, self._block, index * BLOCK_BYTES)
        os.fsync(file)
        os.close(file)

    def read_raw(self) -> None:
        file = os.open(self._folder / "raw", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        for index in range(self._num_blocks):
            os.preadv(file, [self._block], index * BLOCK_BYTES)
        os.close(file)

    def save(self) -> None:
        self._written = write(directory.step_path(self._folder, 1), self._staged, self._meta, ALONE)

    def read_back(self) -> None:
        """Read the saved checkpoint back from disk and compare it with its checksums."""
        read_back(directory.step_path(self._folder, 1), self._written, ALONE)

    def load(self) -> None:
        load(directory.step_path(self._folder, 1), self._shards, self._layout)

    def torch_save(self) -> None:
        with (self._folder / "torch.pt").open("wb") as file:
            torch.save(self._flat, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        loaded = torch.load(self._folder / "torch.pt", weights_only=True)
        for key, x in loaded.items():
            self._into[key].copy_(x)

    def dcp_save(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self._flat, checkpoint_id=self._folder / "dcp", no_dist=True)

    def dcp_load(self) -> None:
        into: dict[str, Any] = self._into
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(into, checkpoint_id=self._folder / "dcp", no_dist=True)


def _table(result: Mapping[str, Mapping[str, Any]], mib: int, rounds: int) -> Table:
    rows = []
    for name, figures in result.items():
        cells = [name, f"{figures['gib_per_s']:.2f}"]
        if name in FLOORS:
            cells += [FLOORS[name], f"{figures['share']:.2f}"]
        if name in TARGETS:
            cells.append(f"{TARGETS[name]:.2f}")
        rows.append(cells)
    heads = ("", "GiB/s", "share of", "share", "at least")
    caption = f"medians over {rounds} rounds, in turns"
    return harness.table(f"a checkpoint of {mib} MiB", heads, rows, caption, left=("share of",))
