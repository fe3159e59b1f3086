"""Twenty steps through any pipeline are those of transformers with torch's AdamW on one process, in float32."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import eval_step
from tests.support.models import changed, weights_of
from tests.support.parity import Course, batches, check_course, layout, local_batch, reference, run_ours, start
from tests.support.ranks import RankPool

STEPS = 20
LAYERS = 5
"""They divide by no number of chunks."""

BATCH = {1: 8, 2: 8, 4: 8, 7: 14}
"""Sequences that divide into so many micro-batches, on one and on two data parallel ranks."""


@cache
def expected(shape: str, layers: int, batch: int, lr: float) -> Course:
    """The reference course of a shape, run once."""
    alone = layout(shape, tp=1, batch=batch, config={"num_hidden_layers": layers})
    return reference(changed(alone, optim={"lr": lr}), STEPS)


def check(ranks: RankPool, resolved: Resolved, shape: str) -> None:
    parallel = resolved.config.parallel
    courses = ranks.run(parallel.tp * parallel.pp * parallel.dp, run_ours, resolved, STEPS, weights_of(resolved))
    layers, batch = resolved.model.num_hidden_layers, resolved.config.train.global_batch
    check_course(courses, expected(shape, layers, batch, resolved.config.optim.lr), resolved)


# tp, pp, dp, virtual_pp, micro-batches: of eight ranks, which take turns on the cores of a small machine, only some.
LAYOUTS = [
    *((*degrees, *rest) for degrees in [(1, 2, 1), (2, 2, 1), (1, 2, 2)] for rest in product([1, 2], [1, 2, 4, 7])),
    *((2, 2, 2, *rest) for rest in [(1, 1), (1, 4), (2, 2), (2, 7)]),
]


@pytest.mark.parametrize(("tp", "pp", "dp", "virtual_pp", "num_micro"), LAYOUTS)
def test_twenty_steps_equal_transformers(
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


@pytest.mark.parametrize("num_micro", [1, 2, 4, 7])
@pytest.mark.parametrize("virtual_pp", [1, 2])
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
        micro=1,
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
