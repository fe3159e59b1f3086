"""Staged chunks have the same layout in memory as in the rank's file."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.manifest import read_manifest
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.save import write_state
from nxtrain.checkpoint.staging import Staging
from nxtrain.common.distributed.agreement import Ranks, StorageScope
from nxtrain.common.io import checksummed_file
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec

BLOCK = 1 << 13
SPECS = {
    "odd.weight": ShardSpec((37, 29), dim=0),
    "empty.weight": ShardSpec((0, 4), dim=0),
    "wide.weight": ShardSpec((64, 96), dim=1),
    "norm.weight": ShardSpec((7,)),
}
KINDS = {"model": torch.bfloat16, "exp_avg": torch.float32, "master": torch.float32}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksummed_file, "BLOCK_BYTES", BLOCK)


def test_a_file_is_its_header_and_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors of two types and odd shapes: all blocks but the first and the last go from where they lie."""
    cut = Layout(ParamTable(SPECS), Mesh(1, 0))
    shards = {
        kind: {name: torch.randn(spec.shape).to(dtype) for name, spec in SPECS.items()} for kind, dtype in KINDS.items()
    }
    staged = Staging(cut).fill(shards)
    mapped, memory = list[int](), checksummed_file.aligned_memory

    def note(size: int) -> mmap.mmap:
        mapped.append(size)
        return memory(size)

    monkeypatch.setattr(checksummed_file, "aligned_memory", note)
    path = directory.step_path(tmp_path, 1)
    meta = Meta(step=1, samples=1, tokens=1, seed=0, family="none", config={}, dtype="float32")
    monkeypatch.setattr("nxtrain.checkpoint.save.read_back", lambda *args: None)
    write_state(path, staged, meta.model_copy(update={"kinds": tuple(shards)}), StorageScope(Ranks(cut.mesh)))

    file = path / "rank-00000.safetensors"
    content = np.fromfile(file, np.uint8)
    first = min(start for tensor in read_manifest(path).tensors.values() for _, _, start in tensor.parts())
    assert first % 4096 == 0
    assert math.prod(staged.memory.shape) == len(content) - first
    assert (content[first:] == staged.memory.numpy()).all()
    assert mapped == [BLOCK], "one block for what comes with the header, and again for the last bytes"
    read = load_file(file)
    held = {f"{kind}/{name}": x for kind, named in shards.items() for name, x in named.items() if x.numel()}
    assert read.keys() == held.keys()
    assert all(torch.equal(read[key], x) for key, x in held.items())


class Stream:
    """Stream of a device, whose work ends when the host waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.waits += 1


def test_copies_to_pinned_memory_are_awaited_by_the_write_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, pinned = Stream(), list[int]()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)

    def pin(memory: torch.Tensor) -> Callable[[], None]:
        pinned.append(memory.data_ptr())
        return pinned.clear

    cut = Layout(ParamTable(SPECS), Mesh(1, 0))
    shards = {"model": {name: torch.randn(spec.shape) for name, spec in SPECS.items()}}
    staging = Staging(cut, pin)
    for step in (1, 2):
        staged = staging.fill(shards)
        assert (stream.waits, pinned) == (step - 1, [staged.memory.data_ptr()])
        path = directory.step_path(tmp_path, step)
        meta = Meta(step=step, samples=1, tokens=1, seed=0, family="none", config={}, dtype="float32")
        write_state(path, staged, meta.model_copy(update={"kinds": tuple(shards)}), StorageScope(Ranks(cut.mesh)))
        assert stream.waits == step
    staging.release()
    assert pinned == [] and not staging.is_allocated
