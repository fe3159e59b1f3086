"""Drawn shapes under every layout that can meet another: parity with transformers and `torch.optim` on one process."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest

from nxtrain.backends.base import Backend
from nxtrain.common.batch_sizes import BatchSizes, SeqLengths
from nxtrain.config.schema import FULLY_SHARDED, OffloadKind
from nxtrain.parallel.fully_sharded import Backward
from tests.support.drawn import OWN_SEED, SEED, Drawn, draw, one_in
from tests.support.drawn_runs import (
    across_a_checkpoint,
    check_drawn,
    error_of_command,
    failures,
    first_weights,
    ours,
    wanted,
    written,
)
from tests.support.drawn_schedules import sizes
from tests.support.layouts import Degrees, all_layouts, covering_array, ramped_layouts
from tests.support.ranks import RankPool

LAYOUTS = covering_array(SEED, 64)
WITH_ALL_PAIRS = len(covering_array(SEED, 0))
"""The first layouts, which hold every two values that can meet; the others repeat them with other shapes."""

INDICES = [
    *range(WITH_ALL_PAIRS),
    *(pytest.param(index, marks=pytest.mark.slow) for index in range(WITH_ALL_PAIRS, len(LAYOUTS))),
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_of_any_layout_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("gloo", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    check_drawn(courses, wanted(run), run)


CONTEXT = covering_array(SEED, 48, cp=True)


@pytest.mark.parametrize("index", one_in(4, range(len(CONTEXT))), ids=lambda index: f"{index}-{CONTEXT[index]}")
def test_a_drawn_run_with_context_parallelism_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("cp", SEED, index, CONTEXT[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    check_drawn(courses, wanted(run), run)


RAMPED = ramped_layouts(SEED)[:16]


@pytest.mark.parametrize("index", one_in(8, range(len(RAMPED))), ids=lambda index: f"{index}-{RAMPED[index]}")
def test_a_drawn_run_of_ramps_equals_transformers_across_a_checkpoint(
    ranks: RankPool, tmp_path: Path, index: int
) -> None:
    run = draw("ramps", SEED, index, RAMPED[index])
    ranks.run(run.degrees.world, across_a_checkpoint, run, written(run, tmp_path))
    errors = [(run, error_of_command(run, tmp_path))]
    assert not failures(errors), failures(errors)


def late(backend: Backend, run: Drawn, overrides: list[str], kind: type[BatchSizes] | type[SeqLengths]) -> None:
    """A run of which each stage of one ramp ends a step late."""
    sound = kind.at
    with patch.object(kind, "at", lambda sizes, step: sound(sizes, max(0, step - 1))):
        across_a_checkpoint(backend, run, overrides)


@pytest.mark.parametrize("kind", [BatchSizes, SeqLengths])
def test_a_stage_that_ends_late_is_seen(
    ranks: RankPool, tmp_path: Path, kind: type[BatchSizes] | type[SeqLengths]
) -> None:
    draws = (draw("ramps", SEED, index) for index in range(100))
    errors = []
    for number, run in enumerate(islice(filter(grows_in_both_ways, draws), 3)):  # a short ramp may have no such step
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks.run(1, late, run, written(run, folder), kind)
        errors.append(error_of_command(run, folder))
    assert not all(error.is_parity for error in errors), errors


def grows_in_both_ways(run: Drawn) -> bool:
    rows, lengths = zip(*sizes(run.resolved.config.train, run.steps), strict=True)
    return len(set(rows)) > 1 and len(set(lengths)) > 1


def test_the_layouts_hold_every_two_values_that_can_meet() -> None:
    def pairs(layouts: list[Degrees]) -> set[tuple[object, ...]]:
        names = [*Degrees.__dataclass_fields__]
        return {
            (a, getattr(layout, a), b, getattr(layout, b)) for layout in layouts for a in names for b in names if a < b
        }

    assert pairs(LAYOUTS[:WITH_ALL_PAIRS]) == pairs([*all_layouts()])
    assert len(LAYOUTS) >= 60


def test_the_draws_hold_every_kind_of_batch() -> None:
    """The limits of a batch leave no kind out, and the parts of a family meet the layouts that divide them."""
    runs = [draw("gloo", OWN_SEED, index, layout) for index, layout in enumerate(covering_array(OWN_SEED, 64))]
    batches = [run.resolved.config.train for run in runs]
    per_rank = [
        batch.global_batch // run.degrees.dp // batch.micro_batch for run, batch in zip(runs, batches, strict=True)
    ]
    kinds = {
        "one token": [batch.seq_len == 1 for batch in batches],
        "more than one block of attention": [batch.seq_len > 128 for batch in batches],
        "a micro-batch of several long rows": [batch.seq_len > 120 and batch.micro_batch > 1 for batch in batches],
        "several long micro-batches": [
            batch.seq_len > 120 and number > 1 for batch, number in zip(batches, per_rank, strict=True)
        ],
        "a micro-batch of three rows": [batch.micro_batch == 3 for batch in batches],
        "one micro-batch": [number == 1 for number in per_rank],
        "more micro-batches than stages": [
            run.degrees.pp > 1 and number > run.degrees.pp for run, number in zip(runs, per_rank, strict=True)
        ],
        "fewer micro-batches than stages": [
            number < run.degrees.pp for run, number in zip(runs, per_rank, strict=True)
        ],
        "masked targets": [run.mask > 0 for run in runs],
        **{
            f"copies of K/V heads of {family}": [
                run.resolved.family.name == family and run.resolved.model.num_kv_heads < run.degrees.tp  # type: ignore[attr-defined]
                for run in runs
            ]
            for family in ("qwen2", "qwen3")
        },
        "norms of heads over tp alone": [
            run.resolved.family.name == "qwen3" and run.degrees.tp > 1 and not run.degrees.sequence_parallel
            for run in runs
        ],
        **{f"{steps} steps": [run.steps == steps for run in runs] for steps in (2, 3, 4)},
    }
    assert {kind: sum(result) for kind, result in kinds.items() if sum(result) < 3} == {}


def test_the_draws_hold_every_kind_of_unit_prefetch_and_offload() -> None:
    drawn = [draw("gloo", OWN_SEED, index, layout) for index, layout in enumerate(covering_array(OWN_SEED, 64))]
    sections = [run.resolved.config.parallel for run in drawn]
    sharded = [parallel for parallel in sections if parallel.shard in FULLY_SHARDED]
    kinds = {
        **{f"{kind} on the host": [kind in section.offload for section in sections] for kind in get_args(OffloadKind)},
        "several kinds on the host": [len(section.offload) > 1 for section in sections],
        **{
            f"{kind} backward": [section.backward_prefetch == kind for section in sharded]
            for kind in get_args(Backward)
        },
        "no forward prefetch": [not section.forward_prefetch for section in sharded],
        "units of a size": [section.unit_params > 1 for section in sharded],
        **{f"{number} ahead": [section.prefetch == number for section in sharded] for number in (0, 1, 2)},
    }
    assert {kind: sum(result) for kind, result in kinds.items() if sum(result) < 3} == {}
