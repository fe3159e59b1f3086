"""Twenty steps on any layout are the twenty steps of transformers with torch's AdamW on one process, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend, Binding
from nxtrain.config.check import Resolved
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS = 20
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
def expected(shape: str) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1), STEPS)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("tp", "dp", "sp"), LAYOUTS)
def test_twenty_steps_equal_transformers(ranks: RankPool, tp: int, dp: int, sp: bool, accumulation: int) -> None:
    resolved = layout("gqa2", tp=tp, dp=dp, sp=sp, micro=4 // dp // accumulation)
    courses = ranks.run(tp * dp, run_ours, resolved, STEPS, weights_of(resolved))
    check_course(courses, expected("gqa2"), resolved)


class Strided(Binding):
    """A machine on which every other rank is near."""

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        return STRIDED


STRIDED = (0, 2, 1, 3)


def run_strided(backend: Backend, resolved: Resolved, steps: int, weights: Mapping[str, Tensor]) -> Course:
    backend.binding = Strided()
    return run_ours(backend, resolved, steps, weights)


@pytest.mark.parametrize("shard", ["none", "zero1"])
def test_ranks_in_an_order_of_the_machines_own_train_alike(ranks: RankPool, shard: str) -> None:
    resolved = layout("gqa2", tp=2, dp=2, sp=True, micro=2, shard=shard)
    courses = ranks.run(4, run_strided, resolved, STEPS, weights_of(resolved))
    check_course([courses[rank] for rank in STRIDED], expected("gqa2"), resolved)


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
