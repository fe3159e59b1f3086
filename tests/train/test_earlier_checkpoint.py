"""A checkpoint that an earlier release wrote over two ranks is read bit for bit, and its run goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.checkpoint.load import read_shards
from nxtrain.checkpoint.manifest import DTYPES, read_manifest
from nxtrain.checkpoint.shard_files import bytes_of
from nxtrain.checkpoint.shards import TensorShard
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.train.command import train
from tests.support.drawn_runs import LOSS, NORM

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoint"
STEP = "step-00000003"
KINDS = {
    "bf16": {"model", "master", "exp_avg", "exp_avg_sq"},
    "fp32": {"model", "exp_avg", "exp_avg_sq"},
}


def expected(precision: str) -> dict[str, Any]:
    """Losses and norms of all six steps, and the SHA-256 of each whole tensor after three."""
    content: dict[str, Any] = json.loads((FOLDER / precision / "expected.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("precision", KINDS)
def test_its_tensors_are_read_bit_for_bit(precision: str) -> None:
    checkpoint = FOLDER / precision / STEP
    manifest = read_manifest(checkpoint)
    shards = []
    for key, entry in manifest.tensors.items():
        kind, _, name = key.partition("/")
        shards.append(replace(TensorShard.whole(name, tuple(entry.shape), DTYPES[entry.dtype]), kind=kind))
    tensors = {shard: torch.empty(shard.shape, dtype=shard.dtype) for shard in shards}
    read_shards(checkpoint, manifest, tensors)
    actual = {shard.key: hashlib.sha256(bytes_of(tensor)).hexdigest() for shard, tensor in tensors.items()}
    assert {key.partition("/")[0] for key in actual} == KINDS[precision]
    assert actual == expected(precision)["sha256"]


def test_its_run_goes_on_over_one_rank(tmp_path: Path) -> None:
    """In float32, where two ranks and one agree on every machine."""
    shutil.copytree(FOLDER / "fp32" / STEP, tmp_path / "run" / "checkpoints" / STEP)
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"data.path={FOLDER / 'rows.npy'}",
        "train.eval_every=0",
        "parallel.tp=1",
    ]
    loaded = load(FOLDER / "fp32" / "config.toml", [*overrides, 'checkpoint.allow_drift=["code"]'])
    train(loaded, resolve_config(loaded, 1))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["step"]: record for record in map(json.loads, lines)}
    assert tuple(records) == (4, 5, 6)
    want = expected("fp32")
    for step, record in records.items():
        assert record["loss"] == pytest.approx(want["losses"][str(step)], rel=0, abs=LOSS)
        assert record["grad_norm"] == pytest.approx(want["grad_norms"][str(step)], rel=NORM)
