"""Saved under one drawn layout, a drawn run goes on under another: the same tensors, and the reference's losses."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from nxtrain.checkpoint import directory
from nxtrain.sharding import Layout
from nxtrain.train.build import build_mesh
from tests.support.checkpoints import Shards
from tests.support.drawn import SEED, Degrees, Drawn, covering_array
from tests.support.drawn_checkpoints import SAVED, draw_pair, load_and_train, train_and_save
from tests.support.drawn_runs import LOSS, NORM, first_weights, wanted
from tests.support.parity import table_of
from tests.support.ranks import RankPool

FEW = covering_array(SEED, 24, lambda degrees: degrees.world <= 4)
LOADED = Random(SEED).sample(FEW, len(FEW))
CASES = [(index, FEW[index], LOADED[index]) for index in range(24)]


def whole(found: list[Shards], run: Drawn) -> dict[tuple[str, str], Tensor]:
    """Tensors of all ranks put together, by kind and global name; every copy must hold the same bits."""
    tensors: dict[tuple[str, str], Tensor] = {}
    seen: dict[tuple[str, str], Tensor] = {}
    for rank, shards in enumerate(found):
        mesh = build_mesh(run.resolved, len(found), rank, len(found))
        held = Layout(table_of(run.resolved, mesh), mesh)
        for kind, local in shards.items():
            for name, blocks in held.items():
                spec = held.table[name]
                for block in blocks:
                    key = kind, spec.global_name(name, block.segment)
                    shape = spec.global_shape(block.segment)
                    into = tensors.setdefault(key, torch.zeros(shape, dtype=local[name].dtype))
                    known = seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                    box = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))
                    part = block.of(local[name])
                    assert torch.equal(into[box][known[box]], part[known[box]]), f"copies of {key} differ"
                    into[box], known[box] = part, True
    assert all(known.all() for known in seen.values())
    return tensors


@pytest.mark.parametrize(
    ("index", "saved", "loaded"), CASES, ids=[f"{index}-{saved}-to-{loaded}" for index, saved, loaded in CASES]
)
def test_a_drawn_run_goes_on_under_another_layout(
    ranks: RankPool, tmp_path: Path, index: int, saved: Degrees, loaded: Degrees
) -> None:
    before, after = draw_pair(SEED, index, saved, loaded, bf16=index % 2 == 1)
    path, weights = directory.step_path(tmp_path, SAVED), first_weights(before)
    one = ranks.run(saved.world, train_and_save, before, weights, path)
    other = ranks.run(loaded.world, load_and_train, after, weights, path)
    written, read = whole([shards for _, shards in one], before), whole([shards for _, shards in other], after)
    assert written.keys() == read.keys()
    assert [key for key, tensor in written.items() if not torch.equal(tensor, read[key])] == []
    if before.resolved.config.precision.params == "fp32":
        want = wanted(before)
        for course, steps in [(c, slice(SAVED)) for c, _ in one] + [(c, slice(SAVED, None)) for c, _ in other]:
            assert course.losses == pytest.approx(want.losses[steps], rel=0, abs=LOSS), before.overrides
            assert course.norms == pytest.approx(want.norms[steps], rel=NORM), before.overrides
