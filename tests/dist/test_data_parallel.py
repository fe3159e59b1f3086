"""However training state is cut over the data parallel ranks, the run is the unsharded one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.drawn import one_in
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS = 3
"""The third starts from moments and weights that two updates have made."""


@cache
def expected(shape: str) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1), STEPS)


CUTS = [
    (shard, tp, 2, accumulation) for shard in ("zero1", "grad_op", "full") for tp in (1, 2) for accumulation in (1, 2)
]
CUTS += [("zero1", 1, 4, 1), ("full", 1, 4, 1), ("hybrid", 1, 4, 1), ("hybrid", 2, 4, 1)]
CUTS += [("zero1", 1, 1, 1), ("full", 1, 1, 1), ("full", 2, 1, 2), ("hybrid", 1, 2, 2)]


@pytest.mark.parametrize(("shard", "tp", "dp", "accumulation"), one_in(3, CUTS))
def test_every_cut_trains_as_transformers_does(
    ranks: RankPool, shard: str, tp: int, dp: int, accumulation: int
) -> None:
    size = 2 if shard == "hybrid" else 0
    micro = 4 // dp // accumulation
    resolved = layout("gqa2", tp=tp, dp=dp, sp=tp == 2, micro=micro, shard=shard, shard_size=size)
    courses = ranks.run(tp * dp, run_ours, resolved, STEPS, weights_of(resolved))
    check_course(courses, expected("gqa2"), resolved)


@pytest.mark.parametrize("tp", [1, 2])
def test_hybrid_sums_micro_batches_inside_the_nodes_and_their_sum_across(ranks: RankPool, tp: int) -> None:
    batch = {"global_batch": 8}
    want = reference(changed(layout("odd", tp=1), train=batch), STEPS)
    resolved = layout("odd", tp=tp, dp=4, sp=tp == 2, micro=1, shard="hybrid", shard_size=2)
    resolved = changed(resolved, train=batch)
    check_course(ranks.run(4 * tp, run_ours, resolved, STEPS, weights_of(resolved)), want, resolved)


# Every shape meets every cut of state, and each of both meets tp and its absence.
SHAPES = [
    (shape, shard, 1 + (row + column) % 2)
    for row, shape in enumerate(["odd", "tied", "mqa"])
    for column, shard in enumerate(["zero1", "grad_op", "full"])
]


@pytest.mark.parametrize(("shape", "shard", "tp"), SHAPES)
def test_shapes_that_do_not_divide_are_cut_and_trained(ranks: RankPool, shape: str, shard: str, tp: int) -> None:
    resolved = layout(shape, tp=tp, dp=2, sp=tp == 2, micro=2, shard=shard)
    check_course(ranks.run(2 * tp, run_ours, resolved, STEPS, weights_of(resolved)), expected(shape), resolved)


OPTIONS: list[dict[str, Any]] = [
    {"prefetch": 0},
    {"prefetch": 2},
    {"backward_prefetch": "after", "forward_prefetch": False},
    {"backward_prefetch": "none"},
    {"unit_params": 40_000},  # blocks of 24 to 30 thousand
    {"offload": ("params", "optimizer")},
    {"offload": ("params",)},
    {"offload": ("optimizer",)},
    {"offload": ("activations",)},
    {"offload": ("params", "optimizer", "activations"), "unit_params": 40_000, "backward_prefetch": "after"},
]


@pytest.mark.parametrize("rule", ["fp32", "bf16_kahan"])
def test_options_of_sharding_change_no_number(ranks: RankPool, rule: str) -> None:
    params = rule[:4]
    resolved = layout("odd", tp=1, dp=2, micro=1, shard="full", params=params, update=rule, remat="selective")
    resolved = changed(resolved, precision={"accumulate": params, "reduce": params})
    weights = weights_of(resolved)
    plain = ranks.run(2, run_ours, resolved, STEPS, weights)
    for options in OPTIONS:
        other = ranks.run(2, run_ours, changed(resolved, parallel=options), STEPS, weights)
        for found, wanted in zip(other, plain, strict=True):
            assert (found.losses, found.norms) == (wanted.losses, wanted.norms), options
            unequal = [name for name, weight in wanted.weights.items() if not torch.equal(found.weights[name], weight)]
            assert unequal == [], options
