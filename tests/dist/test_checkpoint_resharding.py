"""Checkpoints of several ranks load into any layout, bit for bit: other tp, pp and dp, fused or not, padded or not."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.manifest import DTYPES, read_manifest
from nxtrain.common.errors import CheckpointError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from tests.support.ranks import RankPool
from tests.support.run_folders import KINDS, blank, cut, meta, same, save, table

Degrees = tuple[int, int]  # tp, dp


def mesh_of(backend: Backend, degrees: Degrees) -> Mesh:
    return Mesh.build(backend.world, backend.rank, tp=degrees[0], dp=degrees[1])


def save_rank(backend: Backend, path: Path, shape: str, degrees: Degrees, fused: bool) -> None:
    mesh = mesh_of(backend, degrees)
    specs = table(shape, mesh, fused_qkv=fused, fused_gate_up=fused)
    save(path, cut(specs, mesh), Layout(specs, mesh), meta(), retention=Retention(keep=1))


def load_rank(backend: Backend, path: Path, shape: str, degrees: Degrees, fused: bool) -> bool:
    mesh = mesh_of(backend, degrees)
    specs = table(shape, mesh, fused_qkv=fused, fused_gate_up=fused)
    wanted = cut(specs, mesh)
    shards = blank(wanted)
    load(path, shards, Layout(specs, mesh))
    return same(shards, wanted)


def assert_even(sizes: list[int]) -> None:
    """Each within a tenth of their mean."""
    mean = sum(sizes) / len(sizes)
    assert all(abs(size - mean) <= 0.1 * mean for size in sizes), sizes


def test_data_parallel_copies_share_the_writing(ranks: RankPool, tmp_path: Path) -> None:
    path = directory.step_path(tmp_path, 10)
    ranks.run(2, save_rank, path, "gqa2", (1, 2), True)
    assert_even([(path / f"rank-{rank:05d}.safetensors").stat().st_size for rank in range(2)])


DEPTH = {"config": {"num_hidden_layers": 5}}
"""More blocks than chunks."""

Stages = tuple[int, int, int, dict[str, Any]]  # tp, pp, dp, and how the blocks are cut


def staged(backend: Backend, shape: str, stages: Stages) -> Layout:
    tp, pp, _, how = stages
    mesh = Mesh.build(backend.world, backend.rank, tp=tp, pp=pp)
    return Layout(table(shape, mesh, **DEPTH, **how), mesh)


def save_stage(backend: Backend, path: Path, shape: str, stages: Stages) -> None:
    held = staged(backend, shape, stages)
    save(path, cut(held.table, held.mesh), held, meta(), retention=Retention(keep=1))


def load_stage(backend: Backend, path: Path, shape: str, stages: Stages) -> bool:
    held = staged(backend, shape, stages)
    wanted = cut(held.table, held.mesh)
    shards = blank(wanted)
    load(path, shards, held)
    return same(shards, wanted)


ALONE: Stages = (1, 1, 1, {})


@pytest.mark.parametrize("shape", ["odd", "tied"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((1, 2, 1, {}), ALONE),
        (ALONE, (1, 2, 1, {"virtual_pp": 2})),
        ((1, 2, 1, {"virtual_pp": 2}), (1, 4, 1, {})),
        ((2, 2, 1, {"fused_qkv": True}), (1, 3, 1, {"cuts": (3, 4)})),
        ((1, 2, 2, {"cuts": (1,)}), (4, 1, 1, {})),
    ],
)
def test_stages_are_no_part_of_a_checkpoint(
    ranks: RankPool, tmp_path: Path, shape: str, saved: Stages, loaded: Stages
) -> None:
    path = directory.step_path(tmp_path, 10)
    ranks.run(saved[0] * saved[1] * saved[2], save_stage, path, shape, saved)
    whole = table(shape, Mesh(1, 0), **DEPTH).global_shapes()
    manifest = read_manifest(path)
    assert {key: tensor.shape for key, tensor in manifest.tensors.items()} == {
        f"{kind}/{name}": size for kind in KINDS for name, size in whole.items()
    }
    # What was written twice would be in the files, but only once in their index.
    for name, file in manifest.files.items():
        inside = sorted(
            (start, math.prod(sizes) * DTYPES[tensor.dtype].itemsize)
            for tensor in manifest.tensors.values()
            for (_, sizes), where, start in tensor.parts()
            if where == name
        )
        end = inside[0][0]
        for start, num_bytes in inside:
            assert start == end
            end += num_bytes
        assert file.num_bytes == (path / name).stat().st_size == end
    assert all(ranks.run(loaded[0] * loaded[1] * loaded[2], load_stage, path, shape, loaded))


def test_copies_of_a_stage_share_its_writing(ranks: RankPool, tmp_path: Path) -> None:
    """Under a tied embedding too, whose copy the last stage leaves to the first."""
    path = directory.step_path(tmp_path, 10)
    ranks.run(4, save_stage, path, "tied", (1, 2, 2, {}))
    first, second = (
        [(path / f"rank-{rank:05d}.safetensors").stat().st_size for rank in stage] for stage in ((0, 1), (2, 3))
    )
    assert_even(first)
    assert_even(second)


TIED_COPY = "lm_head.weight"


def save_stage_whose_copy_differs(backend: Backend, path: Path, stages: Stages) -> bool:
    """Save, after all of the tied copy and its state changed; returns whether this rank has one."""
    held = staged(backend, "tied", stages)
    shards = cut(held.table, held.mesh)
    has_copy = TIED_COPY in held.table
    for tensors in shards.values():
        if has_copy:
            tensors[TIED_COPY].fill_(7.0)
    save(path, shards, held, meta(), retention=Retention(keep=1))
    return has_copy


def test_a_copy_that_differs_is_in_no_checkpoint_and_a_load_makes_both_equal(ranks: RankPool, tmp_path: Path) -> None:
    """A tied tensor is stored once, by the first stage; all ranks get that one."""
    path = directory.step_path(tmp_path, 10)
    stages: Stages = (2, 2, 1, {})
    assert ranks.run(4, save_stage_whose_copy_differs, path, stages) == [False, False, True, True]
    assert not any(TIED_COPY in key for key in read_manifest(path).tensors)
    assert all(ranks.run(4, load_stage, path, "tied", stages))
    assert all(ranks.run(1, load_stage, path, "tied", ALONE))


def save_without_space(backend: Backend, path: Path) -> str:
    """Rank 1 may write files of one KiB only, as if its disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if backend.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        save_rank(backend, path, "gqa2", (2, 1), True)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def test_one_rank_without_space_fails_the_save_on_all_and_older_checkpoints_stay(
    ranks: RankPool, tmp_path: Path
) -> None:
    older, path = directory.step_path(tmp_path, 10), directory.step_path(tmp_path, 20)
    ranks.run(2, save_rank, older, "gqa2", (2, 1), True)
    first, second = ranks.run(2, save_without_space, path)
    assert first == second
    assert first.startswith(f"cannot write {path}: rank 1: ")
    assert directory.list_checkpoints(tmp_path) == [older]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [directory.LATEST, older.name]
    assert all(ranks.run(2, load_rank, older, "gqa2", (2, 1), True))


def refuse_rank(backend: Backend, path: Path) -> str:
    mesh = mesh_of(backend, (2, 1))
    specs = table("odd", mesh)
    shards = blank(cut(specs, mesh))
    try:
        load(path, shards, Layout(specs, mesh))
    except CheckpointError as error:
        return str(error) if same(shards, blank(shards)) else "touched"
    return ""


def test_all_ranks_refuse_a_wrong_checkpoint_with_the_same_words(ranks: RankPool, tmp_path: Path) -> None:
    path = directory.step_path(tmp_path, 10)
    ranks.run(2, save_rank, path, "gqa2", (2, 1), True)
    first, second = ranks.run(2, refuse_rank, path)
    assert first == second
    assert "model/model.embed_tokens.weight is bfloat16 (128, 64) instead of bfloat16 (131, 64)" in first
