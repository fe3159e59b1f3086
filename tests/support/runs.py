"""Whole runs in folders of their own, and what they leave there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.shards import Shards
from nxtrain.common.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from nxtrain.config.check import Resolved
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.train.command import train_on
from nxtrain.train.compatibility import RunInputs
from nxtrain.train.context import RunContext
from nxtrain.train.start import shards_of, start
from tests.support.models import BASE, plan

SEQ_LEN = 16
GLOBAL_BATCH = 4
QUIET = {"log_every": 1, "tensorboard": False, "progress": False}
TIMINGS = {"tokens_per_s", "step_time_s", "mfu", "goodput", "saved_step", "peak_memory_bytes", *KINDS_S, *SECTIONS_S}
"""Keys of a record that depend on the clock."""


def token_file(path: Path, num_rows: int, seed: int = 0) -> Path:
    """A .npy of random rows for the models of `plan`."""
    rows = np.random.default_rng(seed).integers(0, BASE["vocab_size"], (num_rows, SEQ_LEN + 1), dtype=np.uint16)
    np.save(path, rows)
    return path


def run_plan(run_dir: Path, data: Mapping[str, Any], *, steps: int, **sections: Mapping[str, Any]) -> Resolved:
    """A short run with everything logged; `sections` override its tables."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"dir": run_dir},
        "data": dict(data),
        "train": {"steps": steps, "seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "micro_batch": 1},
        "optim": {"lr": 1e-2, "min_lr": 1e-3},
        "metrics": QUIET,
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return plan("gqa2", **tables)


def train_rank(backend: Backend, resolved: Resolved) -> None:
    train_on(RunContext.open(backend, resolved))


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def course(run_dir: Path) -> list[dict[str, Any]]:
    """The records without what depends on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records(run_dir)]


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints of a run, in order."""
    return [directory.step_of(path) for path in directory.list_checkpoints(run_dir / CHECKPOINTS_DIR)]


def state_at(backend: Backend, run_dir: Path, step: int, resolved: Resolved) -> Shards:
    """Every tensor of a checkpoint, whole: one rank loads what any number of ranks saved."""
    path = directory.step_path(run_dir / CHECKPOINTS_DIR, step)
    config = resolved.config
    degrees = {"tp": 1, "cp": 1, "pp": 1, "virtual_pp": 1, "dp": 1, "shard_size": 0}
    alone_degrees = {**degrees, "pipeline_cuts": (), "sequence_parallel": False}
    parallel = config.parallel.model_copy(update=alone_degrees)
    checkpoint = config.checkpoint.model_copy(update={"resume": str(path)})
    elsewhere = config.run.model_copy(update={"dir": run_dir / "read"})  # in the folder itself the run would go back
    alone = config.model_copy(update={"run": elsewhere, "parallel": parallel, "checkpoint": checkpoint})
    saved = read_meta(path)
    inputs = RunInputs(saved.data_fingerprint, saved.tokenizer_fingerprint)
    context = RunContext.open(backend, Resolved(alone, resolved.family, resolved.model))
    state, *_ = start(context, inputs)
    return shards_of(state)


def assert_equal_bits(a: Shards, b: Shards) -> None:
    assert {(kind, name) for kind in a for name in a[kind]} == {(kind, name) for kind in b for name in b[kind]}
    for kind, tensors in a.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, b[kind][name]), (kind, name)


FILE = "config.toml"

TINY: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny"},
    "train": {"steps": 12, "seq_len": SEQ_LEN, "global_batch": 2, "micro_batch": 1, "eval_every": 0},
    "data": {"source": "tokens"},
    "metrics": QUIET,
    "backend": {"name": "cpu"},
}
"""One rank, every step logged."""


def write_toml(folder: Path, *, num_rows: int = 18, **sections: Mapping[str, Any]) -> Path:
    """Write the configuration of a run in `folder/run`, and its random rows."""
    folder.mkdir(exist_ok=True)
    tables = {"run": {"dir": folder / "run"}, **{name: dict(table) for name, table in TINY.items()}}
    tables["data"]["path"] = folder / "rows.npy"
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    if tables["data"]["path"] == folder / "rows.npy":
        token_file(folder / "rows.npy", num_rows)
    path = folder / FILE
    path.write_text("\n".join(_lines(tables)) + "\n", encoding="utf-8")
    return path


def _lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    results = []
    for name, table in tables.items():
        results.append(f"[{name}]")
        for key, value in table.items():
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            results += [f"{key}.{own} = {_text(one)}" if own else f"{key} = {_text(one)}" for own, one in inner]
    return results


def _text(value: object) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)  # the same in TOML for these types
