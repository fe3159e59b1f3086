"""Saved under one drawn layout, a drawn run goes on under another: the same tensors, and the reference's losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.directory import Retention
from nxtrain.common.errors import ConfigError
from nxtrain.common.sharding import Layout
from nxtrain.train.build import build_mesh
from nxtrain.train.start import restore, shards_of
from nxtrain.train.step import TrainState, train_step
from tests.support.drawn import SEED, TRIES, Drawn, draw, one_in
from tests.support.drawn_runs import LOSS, NORM, first_weights, wanted
from tests.support.layouts import Degrees, covering_array
from tests.support.models import MIXTURES
from tests.support.parity import Course, local_pair, start, table_of
from tests.support.ranks import RankPool
from tests.support.run_folders import Shards, meta, save

SAVED, STEPS = 1, 3
"""Steps before the checkpoint, and in all: the last loss is that of an update from the state that was loaded."""

MODEL = "model.config."
SHARED = (MODEL, "model.family=", "model.moe_", "optim.", "precision.", "train.seq_len=", "train.global_batch=")
"""Beginnings of the overrides that two layouts of one run have in common; all others are drawn for each."""


def draw_pair(
    seed: int, index: int, saved: Degrees, loaded: Degrees, *, bf16: bool, family: str = ""
) -> tuple[Drawn, Drawn]:
    """One run under two layouts; without the load balancing loss, which depends on the micro-batches."""
    rng = Random(f"pair/{seed}/{index}")
    both = Degrees(
        tp=math.lcm(saved.tp, loaded.tp),
        pp=max(saved.pp * saved.virtual_pp, loaded.pp * loaded.virtual_pp),
        dp=math.lcm(saved.dp, loaded.dp),
        sequence_parallel=saved.sequence_parallel or loaded.sequence_parallel,
        cp=2 * math.lcm(saved.cp, loaded.cp) if max(saved.cp, loaded.cp) > 1 else 1,
        ep=math.lcm(saved.ep, loaded.ep),
    )
    own_family = family if both.ep > 1 else ""
    for _ in range(TRIES):
        number = rng.randrange(1 << 30)
        try:
            whole = draw("checkpoint", seed, number, both, bf16=bf16, family=family)
            if family in MIXTURES:
                whole = replace(whole, overrides=(*whole.overrides, "model.config.router_aux_loss_coef=0.0"))
            return _relaid(whole, index, saved, rng, own_family), _relaid(whole, index, loaded, rng, own_family)
        except ConfigError:
            continue
    raise AssertionError(f"no run suits {saved} and {loaded}")


def _relaid(whole: Drawn, index: int, degrees: Degrees, rng: Random, family: str) -> Drawn:
    """The same run under another layout, with options of its own."""
    other = draw(whole.lane, whole.seed, rng.randrange(1 << 30), degrees, family=family)
    shared = [line for line in whole.overrides if line.startswith(SHARED)]
    own = [line for line in other.overrides if not line.startswith((*SHARED, "train.micro_batch="))]
    own = [line for line in own if not line.startswith("parallel.pipeline_cuts=")]
    rows = whole.resolved.config.train.global_batch // degrees.dp
    micro_batch = f"train.micro_batch={_micro_batch(rows, degrees.pp + 1)}"
    result = replace(other, index=index, overrides=(*own, *shared, micro_batch), steps=STEPS, mask=0.0)
    _ = result.resolved
    return result


def _micro_batch(rows: int, most: int) -> int:
    """The smallest micro-batch by which a rank's rows are as many micro-batches as a draw may have, or fewer."""
    return next(size for size in range(1, rows + 1) if rows % size == 0 and rows // size <= most)


def train_and_save(backend: Backend, drawn: Drawn, weights: dict[str, Tensor], path: Path) -> tuple[Course, Shards]:
    """Train up to the checkpoint; losses, norms and the tensors that were saved."""
    state = start(backend, drawn.resolved, weights)
    course = _steps(state, drawn, range(SAVED))
    shards = shards_of(state)
    dtype = str(state.precision.params).removeprefix("torch.")
    save(path, shards, state.layout, meta(step=SAVED, dtype=dtype), retention=Retention(keep=2))
    return course, _copies(shards)


def load_and_train(backend: Backend, drawn: Drawn, weights: dict[str, Tensor], path: Path) -> tuple[Course, Shards]:
    """Go on from the checkpoint, with first weights that it must replace; and the tensors that were loaded."""
    state = start(backend, drawn.resolved, {name: torch.full_like(weight, 9.0) for name, weight in weights.items()})
    restore(state, path, weights_only=False)
    state.optimizer.num_updates.copy_(backend.put(torch.full((2,), float(SAVED))))
    loaded = _copies(shards_of(state))
    return _steps(state, drawn, range(SAVED, drawn.steps)), loaded


def _steps(state: TrainState, drawn: Drawn, steps: range) -> Course:
    losses, norms = [], []
    config, data = drawn.resolved.config, drawn.batches()
    for step in steps:
        result = train_step(state, local_pair(state, data[step], config.train.micro_batch), config.optim.lr)
        read = state.backend.fetch({"loss": result.loss, "norm": result.grad_norm})
        losses.append(read["loss"])
        norms.append(read["norm"])
    return Course(losses, norms, {})


def _copies(shards: Mapping[str, Mapping[str, Tensor]]) -> Shards:
    return {kind: {name: t.detach().clone() for name, t in tensors.items()} for kind, tensors in shards.items()}


FEW = covering_array(SEED, 24, lambda degrees: degrees.world <= 4)
LOADED = Random(SEED).sample(FEW, len(FEW))
CONTEXT = covering_array(SEED, 4, lambda degrees: degrees.world <= 4, cp=True)[:4]
PAIRS = [*zip(FEW[:24], LOADED, strict=False), *zip(CONTEXT, FEW, strict=False), *zip(FEW, CONTEXT, strict=False)]
CASES = [(index, saved, loaded) for index, (saved, loaded) in enumerate(PAIRS)]


def whole(result: list[Shards], run: Drawn) -> dict[tuple[str, str], Tensor]:
    """Tensors of all ranks put together, by kind and global name; every copy must hold the same bits."""
    tensors: dict[tuple[str, str], Tensor] = {}
    seen: dict[tuple[str, str], Tensor] = {}
    for rank, shards in enumerate(result):
        mesh = build_mesh(run.resolved, len(result), rank, len(result))
        held = Layout(table_of(run.resolved, mesh), mesh)
        for kind, local in shards.items():
            for name, blocks in held.items():
                spec = held.table[name]
                for block in blocks:
                    key = kind, spec.global_name(name, block.segment)
                    shape = spec.global_shape(block.segment)
                    into = tensors.setdefault(key, torch.zeros(shape, dtype=local[name].dtype))
                    covered = seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                    box = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))
                    part = block.of(local[name])
                    assert torch.equal(into[box][covered[box]], part[covered[box]]), f"copies of {key} differ"
                    into[box], covered[box] = part, True
    assert all(covered.all() for covered in seen.values())
    return tensors


@pytest.mark.parametrize(
    ("index", "saved", "loaded"),
    one_in(3, CASES),
    ids=[f"{index}-{saved}-to-{loaded}" for index, saved, loaded in CASES],
)
def test_a_drawn_run_goes_on_under_another_layout(
    ranks: RankPool, tmp_path: Path, index: int, saved: Degrees, loaded: Degrees
) -> None:
    goes_on(ranks, tmp_path, draw_pair(SEED, index, saved, loaded, bf16=index % 2 == 1))


EXPERTS = [(index, saved, loaded) for index, saved, loaded in CASES if index % 3 == 1]


@pytest.mark.parametrize(
    ("index", "saved", "loaded"),
    one_in(4, EXPERTS),
    ids=[f"{index}-{saved}-to-{loaded}" for index, saved, loaded in EXPERTS],
)
def test_a_drawn_run_with_experts_goes_on_under_another_layout(
    ranks: RankPool, tmp_path: Path, index: int, saved: Degrees, loaded: Degrees
) -> None:
    family = MIXTURES[index % 2]
    goes_on(ranks, tmp_path, draw_pair(SEED, index, saved, loaded, bf16=index % 4 == 1, family=family))


DIVIDED = covering_array(SEED, 8, lambda degrees: degrees.world <= 4 or degrees.ep == 3, ep=True)[:8]
OF_DIVIDED = [*pairwise(DIVIDED), *zip(DIVIDED, FEW, strict=False), *zip(FEW, DIVIDED, strict=False)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    one_in(7, OF_DIVIDED),
    ids=[f"{saved}-to-{loaded}" for saved, loaded in OF_DIVIDED],
)
def test_divided_experts_go_on_under_another_division(
    ranks: RankPool, tmp_path: Path, saved: Degrees, loaded: Degrees
) -> None:
    index = OF_DIVIDED.index((saved, loaded))
    family = MIXTURES[index % 2]
    goes_on(ranks, tmp_path, draw_pair(SEED, 100 + index, saved, loaded, bf16=index % 3 == 0, family=family))


def goes_on(ranks: RankPool, tmp_path: Path, pair: tuple[Drawn, Drawn]) -> None:
    """Save under one layout, load under the other, and compare with the reference."""
    before, after = pair
    saved, loaded = before.degrees, after.degrees
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
