"""Training through any pipeline is that of transformers with torch's AdamW on one process, in float32.

The order and the progress of every schedule are proven as data, in `tests/unit/parallel/test_schedule.py`.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import eval_step
from tests.support.models import changed, weights_of
from tests.support.parity import Course, batches, check_course, layout, local_batch, reference, run_ours, start
from tests.support.ranks import RankPool

STEPS, MANY = 3, 20
LAYERS = 5
"""They divide by no number of chunks."""

BATCH = {1: 8, 2: 8, 4: 8, 7: 14}
"""Sequences that divide into so many micro-batches, on one and on two data parallel ranks."""


@cache
def expected(shape: str, layers: int, batch: int, lr: float, steps: int) -> Course:
    """The reference course of a shape, run once."""
    alone = layout(shape, tp=1, batch=batch, config={"num_hidden_layers": layers})
    return reference(changed(alone, optim={"lr": lr}), steps)


def check(ranks: RankPool, resolved: Resolved, shape: str, steps: int = STEPS) -> None:
    parallel = resolved.config.parallel
    courses = ranks.run(parallel.tp * parallel.pp * parallel.dp, run_ours, resolved, steps, weights_of(resolved))
    layers, batch = resolved.model.num_hidden_layers, resolved.config.train.global_batch
    check_course(courses, expected(shape, layers, batch, resolved.config.optim.lr, steps), resolved)


# tp, pp, dp, virtual_pp, micro-batches. Two stages alone meet every number of micro-batches under both kinds of
# stages; beside other axes every two values of two factors meet.
TURNS = [(1, 1), (2, 2), (1, 4), (2, 7)]
OTHER_TURNS = [(2, 1), (1, 2), (2, 4), (1, 7)]
LAYOUTS = [
    *((1, 2, 1, *rest) for rest in product([1, 2], [1, 2, 4, 7])),
    *((2, 2, 1, *rest) for rest in TURNS),
    *((1, 2, 2, *rest) for rest in OTHER_TURNS),
    *((2, 2, 2, *rest) for rest in [(1, 4), (2, 7)]),
]


@pytest.mark.parametrize(("tp", "pp", "dp", "virtual_pp", "num_micro"), LAYOUTS)
def test_few_steps_equal_transformers(
    ranks: RankPool, tp: int, pp: int, dp: int, virtual_pp: int, num_micro: int
) -> None:
    resolved = layout(
        "gqa2",
        tp=tp,
        pp=pp,
        dp=dp,
        virtual_pp=virtual_pp,
        batch=BATCH[num_micro],
        micro=BATCH[num_micro] // (num_micro * dp),
        config={"num_hidden_layers": LAYERS},
    )
    check(ranks, resolved, "gqa2")


def test_twenty_steps_equal_transformers(ranks: RankPool) -> None:
    how: dict[str, Any] = {"tp": 2, "pp": 2, "virtual_pp": 2, "batch": 8, "micro": 2, "sp": True}
    check(ranks, layout("gqa2", **how, config={"num_hidden_layers": LAYERS}), "gqa2", MANY)


@pytest.mark.parametrize(("virtual_pp", "num_micro"), TURNS)
def test_four_stages_too(ranks: RankPool, virtual_pp: int, num_micro: int) -> None:
    """At a learning rate that lets rounding grow no faster in nine blocks than it does in five."""
    resolved = layout(
        "gqa2",
        tp=1,
        pp=4,
        virtual_pp=virtual_pp,
        batch=BATCH[num_micro],
        micro=BATCH[num_micro] // num_micro,
        config={"num_hidden_layers": 9},
    )
    check(ranks, changed(resolved, optim={"lr": 3e-4}), "gqa2")


SHARDS = ["none", "zero1", "grad_op", "full"]


@pytest.mark.parametrize(("shard", "virtual_pp"), list(product(SHARDS, [1, 2])))
def test_a_tied_embedding_stays_one(ranks: RankPool, shard: str, virtual_pp: int) -> None:
    """Whatever cuts the state of its two copies, which lie on different ranks."""
    resolved = layout(
        "tied",
        tp=1,
        pp=2,
        dp=2,
        virtual_pp=virtual_pp,
        batch=8,
        micro=2,
        shard=shard,
        config={"num_hidden_layers": LAYERS},
    )
    check(ranks, resolved, "tied")


@pytest.mark.parametrize(
    ("shard", "dp", "sp", "remat", "virtual_pp"),
    [
        ("none", 1, True, "selective", 2),
        ("none", 1, False, "full", 1),
        ("zero1", 2, True, "full", 2),
        ("grad_op", 2, False, "selective", 1),
        ("full", 2, True, "full", 2),
    ],
)
def test_everything_composes(ranks: RankPool, shard: str, dp: int, sp: bool, remat: str, virtual_pp: int) -> None:
    resolved = layout(
        "odd",
        tp=2,
        pp=2,
        dp=dp,
        sp=sp,
        virtual_pp=virtual_pp,
        batch=8,
        micro=2 // dp,
        shard=shard,
        remat=remat,
        config={"num_hidden_layers": LAYERS},
    )
    check(ranks, resolved, "odd")


def test_cuts_are_free(ranks: RankPool) -> None:
    resolved = layout("gqa2", tp=1, pp=3, cuts=(3, 4), batch=4, micro=1, config={"num_hidden_layers": LAYERS})
    check(ranks, resolved, "gqa2")


def evaluated(backend: Backend, resolved: Resolved, weights: dict[str, object]) -> list[float]:
    state = start(backend, resolved, weights)  # type: ignore[arg-type]
    (batch,) = batches(resolved, 1)
    found = eval_step(state, local_batch(state, batch, resolved.config.train.micro_batch))
    read = backend.fetch({f"{i}{j}": value for i, pair in enumerate(found) for j, value in enumerate(pair)})
    return list(read.values())


@pytest.mark.parametrize("virtual_pp", [1, 2])
def test_evaluation_gives_every_rank_the_loss_of_each_micro_batch(ranks: RankPool, virtual_pp: int) -> None:
    config = {"num_hidden_layers": LAYERS}
    alone = layout("gqa2", tp=1, batch=6, micro=2, config=config)
    (want,) = ranks.run(1, evaluated, alone, weights_of(alone))
    resolved = layout("gqa2", tp=2, pp=2, virtual_pp=virtual_pp, batch=6, micro=2, config=config)
    for found in ranks.run(4, evaluated, resolved, weights_of(resolved)):
        assert found == pytest.approx(want, rel=1e-6)
