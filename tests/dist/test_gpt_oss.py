"""gpt-oss on every kind of layout: drawn runs next to transformers' eager model in float64, and defects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.ranged_attention import SinkAttention
from nxtrain.parallel.expert_products import ClampedUnit
from nxtrain.parallel.linear import RowLinear
from tests.support.drawn import SEED, Drawn, draw
from tests.support.drawn_runs import (
    NORM,
    WEIGHT,
    error_of,
    failures,
    first_weights,
    norm_error,
    ours,
    ours_in_static_shapes,
    wanted,
)
from tests.support.layouts import Degrees
from tests.support.parity import Course
from tests.support.ranks import RankPool

LAYOUTS = [
    Degrees(),
    Degrees(),
    Degrees(tp=2),
    Degrees(tp=2, sequence_parallel=True),
    Degrees(dp=2, ep=2),
    Degrees(dp=2, ep=2, shard="zero1"),
    Degrees(dp=2, ep=2, shard="full"),
    Degrees(dp=2, shard="grad_op"),
    Degrees(pp=2, virtual_pp=2),
    Degrees(pp=2, schedule="zero_bubble"),
    Degrees(dp=4, shard="hybrid"),
    Degrees(tp=2, dp=2, ep=2, sequence_parallel=True, shard="full"),
]


NEAR = 1e-6
"""Relative distance from the limit of the clamped unit, below which rounding may decide the side of an activation."""


def drawn(index: int, degrees: Degrees) -> Drawn:
    return draw("gpt-oss", SEED, index, degrees, family="gpt_oss")


def is_at_limit(run: Drawn) -> bool:
    """True if the references with a slightly lower and a slightly higher limit differ."""
    key = "model.config.swiglu_limit="
    (limit,) = (float(line.removeprefix(key)) for line in run.overrides if line.startswith(key))
    below, above = (
        wanted(replace(run, overrides=(*run.overrides, f"{key}{limit * (1 + side * NEAR)}"))) for side in (-1, 1)
    )
    norm = max(norm_error(a, b) for a, b in zip(below.norms, above.norms, strict=True))
    weight = max(float((below.weights[name] - above.weights[name]).abs().max()) for name in below.weights)
    return norm > NORM / 2 or weight > WEIGHT / 2


def check(ranks: RankPool, index: int, body: Callable[..., Course]) -> None:
    """Hold a drawn run against transformers; a run with an activation at the limit is replaced by another draw.

    The gradient has a jump there, and rounding decides the side of the activation.
    """
    for again in range(10):
        run = drawn(index + again * len(LAYOUTS), LAYOUTS[index])
        courses = ranks.run(run.degrees.world, body, run, first_weights(run))
        error = error_of(courses, wanted(run), run)
        if error.is_parity or not is_at_limit(run):
            break
    assert error.is_parity, failures([(run, error)])


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_equals_transformers(ranks: RankPool, index: int) -> None:
    check(ranks, index, ours)


@pytest.mark.parametrize("index", [0, 3, 4])
def test_blocks_of_equal_size_compute_the_same(ranks: RankPool, index: int) -> None:
    check(ranks, index, ours_in_static_shapes)


def defective(backend: Backend, run: Drawn, weights: dict[str, Tensor], defect: str) -> Course:
    with pytest.MonkeyPatch.context() as patch:
        if defect == "sinks":
            right = SinkAttention.backward

            def without_sinks(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
                found = list(right(ctx, grad))
                found[3] = torch.zeros_like(found[3]) if found[3] is not None else None
                return tuple(found)

            patch.setattr(SinkAttention, "backward", staticmethod(without_sinks))
        if defect == "limit":
            patch.setattr(ClampedUnit, "__call__", lambda unit, gate, values: (values + 1) * torch.sigmoid(gate) * gate)
        if defect == "bias":
            patch.setattr(RowLinear, "exit", lambda layer, out: layer.tp.exit(out) + layer.bias / 2)
        return ours(backend, run, weights)


@pytest.mark.parametrize("defect", ["none", "sinks", "limit", "bias"])
def test_a_defect_would_be_seen(ranks: RankPool, defect: str) -> None:
    run = drawn(2, LAYOUTS[2])
    run = replace(run, overrides=(*run.overrides, "model.config.swiglu_limit=0.1"))
    courses = ranks.run(2, defective, run, first_weights(run), defect)
    errors = [(run, error_of(courses, wanted(run), run))]
    assert bool(failures(errors)) == (defect != "none"), errors
