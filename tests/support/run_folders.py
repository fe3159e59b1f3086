"""Run folders as a run leaves them, written without a run."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import tidy, write_state
from nxtrain.checkpoint.staging import Staging
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.clock import Instant
from nxtrain.common.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, LOGS_DIR, METRICS_FILE, STARTS_FILE, SUMMARY_FILE
from nxtrain.common.sharding import Layout, ParamTable, row_cut
from nxtrain.config.tables import toml_key, toml_value
from nxtrain.metrics.goodput import RunStart, TimeSpent
from nxtrain.metrics.start_log import StartLog
from tests.support.parity import layout, table_of


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder on a file system of its own; skips the test where none can be mounted."""
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder))
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs, and not in every container; runs as root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


T = TypeVar("T")

SPECIAL_KINDS = ("a FIFO", "a socket", "a device")

NOBODY = 65534


def put(path: Path, kind: str) -> None:
    """Put a special file in the place of another, or where there was none."""
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to(os.devnull)
    else:
        before = Path.cwd()
        os.chdir(path.parent)  # addresses of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(before)


def in_time(action: Callable[[], T], within_s: float = 30.0) -> T:
    """Result of an action that must not hang; a thread that does is left behind."""
    results: list[T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            results.append(action())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=act, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    return results[0]


@contextmanager
def as_nobody() -> Iterator[Path]:
    """Act as a user whom rights bind, and not as root; yields a folder of that user."""
    folder = Path(tempfile.mkdtemp(prefix="nxtrain-nobody-"))
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


Shards = dict[str, dict[str, Tensor]]

KINDS = {"model": torch.bfloat16, "exp_avg": torch.float32}
"""Kinds of tensors in these tests, and their types."""


def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a key: random, never zero, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.rand(shape, generator=generator).add_(0.5).to(dtype)


def cut(table: ParamTable, mesh: Mesh, kinds: Mapping[str, torch.dtype] = KINDS) -> Shards:
    """Shards that a rank holds of the tensors of `whole`."""

    def shard(kind: str, name: str, dtype: torch.dtype) -> Tensor:
        spec = table[name]
        tensors = {
            s.name: whole(f"{kind}/{spec.global_name(name, s)}", spec.global_shape(s), dtype) for s in spec.segments
        }
        local = spec.shard(tensors, mesh.tp)
        return local.narrow(0, *row_cut(local.shape[0], mesh.shard))

    return {kind: {name: shard(kind, name, dtype) for name in table} for kind, dtype in kinds.items()}


def blank(shards: Shards) -> Shards:
    """Tensors of the same form, filled with something that a load must replace, padding included."""
    return {k: {name: torch.full_like(t, 9.0) for name, t in tensors.items()} for k, tensors in shards.items()}


def same(a: Shards, b: Shards) -> bool:
    """True if two sets of shards are equal bit for bit."""
    return {(k, n) for k in a for n in a[k]} == {(k, n) for k in b for n in b[k]} and all(
        torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind]
    )


def table(shape: str, mesh: Mesh, **changes: Any) -> ParamTable:
    """Sharding of a small model by a mesh; changes are those of `layout`, such as `fused_qkv` and `virtual_pp`."""
    return table_of(layout(shape, tp=mesh.tp_size, pp=mesh.pp_size, dp=mesh.dp_size, **changes), mesh)


def meta(step: int = 10, **changes: Any) -> Meta:
    values = {"step": step, "samples": 80, "tokens": 2560, "seed": 1, "family": "llama", "config": {}}
    return Meta(**{**values, "dtype": "bfloat16", **changes})


def save(
    path: Path,
    shards: Mapping[str, Mapping[str, Tensor]],
    layout: Layout,
    meta: Meta,
    *,
    tokenizer: Path | None = None,
    retention: Retention = Retention(),  # noqa: B008
) -> None:
    """Write a checkpoint of tensors to a folder that all ranks see, as a run does; every rank calls this."""
    scope, staged = StorageScope(Ranks(layout.mesh)), Staging(layout).fill(shards)
    write_state(path, staged, meta.model_copy(update={"kinds": tuple(shards)}), scope, tokenizer)
    tidy(path, retention, scope)


def record(step: int, **more: Any) -> dict[str, Any]:
    """A record of a step whose numbers depend on the step only."""
    loss, norm = 3 + 5 / math.sqrt(step), 0.5 + 1 / step
    return {
        **{"step": step, "loss": loss, "grad_norm": norm, "grad_norm_mean": norm, "param_norm": 19 + step / 100},
        **{"lost_update_frac": 0.0, "lr": 1e-3, "tokens": 1024 * step, "tokens_per_s": 5e4, "step_time_s": 0.02},
        **{"mfu": None, "goodput": 0.9, "peak_memory_bytes": 3 << 30, "data_s": 0.001, "training_s": 0.019},
        **more,
    }


def start(resumed: int, last: int, *, began: float, outcome: str = "done", why: str = "") -> RunStart:
    """A start whose steps take a tenth of a second."""
    spent = TimeSpent(last, start_s=2.0, train_s=0.1 * (last - resumed), eval_s=0.5, stall_s=0.25)
    seen = Instant("boot", began + spent.total_s + 0.5, 1.7e9 + began + spent.total_s + 0.5)
    return RunStart(
        resumed, Instant("boot", began, 1.7e9 + began), seen, spent, outcome, ((last, spent.train_s),), why=why
    )


def restarted(steps: int, why: str = "rank 1 was killed") -> list[RunStart]:
    """Two starts, the first of which fails after half of the steps and loses ten."""
    half = steps // 2
    first = start(0, half, began=100.0, outcome="failed", why=why)
    return [first, start(half - 10, steps, began=first.seen.up + 5)]


def write_run(
    folder: Path,
    *,
    name: str = "run",
    steps: int = 60,
    records: Sequence[Mapping[str, Any]] | None = None,
    starts: Sequence[RunStart] | None = None,
    environment: Mapping[str, Any] | None = None,
    **config: Mapping[str, Any],
) -> Path:
    """Write a run folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"name": name, "seed": 0},
        "cluster": {"instance": "", "nodes": 1},
        "train": {"steps": steps, "global_batch": 16, "seq_len": 64},
    }
    lines = []
    for section in dict.fromkeys((*sections, *config)):
        lines.append(f"[{toml_key(section)}]")
        values = {**sections.get(section, {}), **config.get(section, {})}
        lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in values.items()]
    (folder / CONFIG_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if records is None:
        records = [record(step, **_extras(step)) for step in range(1, steps + 1)]
    text = "".join(f"{json.dumps(item)}\n" for item in records)
    (folder / METRICS_FILE).write_text(text, encoding="utf-8")
    (folder / LOGS_DIR / STARTS_FILE).unlink(missing_ok=True)
    log = StartLog(folder / LOGS_DIR)
    for item in restarted(steps) if starts is None else starts:
        log.add("start", replace(item, outcome="", why="", spent=TimeSpent(item.resumed), seen=item.began, course=()))
        log.add("end", item)
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment or {"torch": "2.9.0"}), encoding="utf-8")
    (folder / SUMMARY_FILE).write_text(json.dumps({"bits_per_byte": 1.5}), encoding="utf-8")
    return folder


def _extras(step: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if step % 20 == 0:
        results |= {"val_loss": 3.2 + 5 / math.sqrt(step), "evaluation_s": 0.2, "checkpoint_s": 0.1}
    if step == 31:
        results |= {"grad_norm": 4.0, "spikes": [[31, 1]], "alarm": "spike: grad_norm 4 is 8 times the median"}
    return results
