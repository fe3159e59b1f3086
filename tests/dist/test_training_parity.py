"""Training on any layout is that of transformers with torch's AdamW on one process, in float32.

Three steps show a wrong gradient, norm or update. Twenty, on two layouts here and on a pipeline in `test_pipeline.py`,
show that rounding does not grow.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS, MANY = 3, 20
LONG = {(2, 2, True, 2), (4, 1, False, 1)}
"""Layouts and accumulations that train for many steps."""

LAYOUTS = [
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (2, 2, False),
    (2, 2, True),
    (4, 1, False),
    (4, 1, True),
]


@cache
def expected(shape: str, steps: int = STEPS) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1), steps)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("tp", "dp", "sp"), LAYOUTS)
def test_every_layout_trains_as_transformers_does(
    ranks: RankPool, tp: int, dp: int, sp: bool, accumulation: int
) -> None:
    steps = MANY if (tp, dp, sp, accumulation) in LONG else STEPS
    resolved = layout("gqa2", tp=tp, dp=dp, sp=sp, micro=4 // dp // accumulation)
    courses = ranks.run(tp * dp, run_ours, resolved, steps, weights_of(resolved))
    check_course(courses, expected("gqa2", steps), resolved)


@pytest.mark.parametrize(
    ("shape", "tp", "sp"),
    [
        ("mqa", 4, True),  # each K/V head on four ranks
        ("mqa", 2, False),
        ("odd", 2, False),  # padded vocabulary and feed-forward
        ("odd", 4, True),
        ("tied", 2, True),
    ],
)
def test_every_shape_trains_as_transformers_does(ranks: RankPool, shape: str, tp: int, sp: bool) -> None:
    resolved = layout(shape, tp=tp, sp=sp)
    check_course(ranks.run(tp, run_ours, resolved, STEPS, weights_of(resolved)), expected(shape), resolved)


def test_norm_weights_decay_like_all_others_when_asked(ranks: RankPool) -> None:
    """As in the 7B recipe; at this decay the norms' weights tell the two apart."""
    strong = {"weight_decay": 1.0}
    alone, resolved = (
        changed(layout("gqa2", tp=tp, sp=tp == 2), optim={**strong, "decay_norms": True}) for tp in (1, 2)
    )
    want, plain = (reference(plan, STEPS) for plan in (alone, changed(alone, optim={"decay_norms": False})))
    check_course(ranks.run(2, run_ours, resolved, STEPS, weights_of(resolved)), want, resolved)
    name = "model.norm.weight"
    assert (want.weights[name] - plain.weights[name]).abs().min() > 1e-3
