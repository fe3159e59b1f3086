"""Training through any pipeline is that of transformers with torch's AdamW on one process, in float32."""

from __future__ import annotations

from functools import cache
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


def test_twenty_steps_equal_transformers(ranks: RankPool) -> None:
    how: dict[str, Any] = {"tp": 2, "pp": 2, "virtual_pp": 2, "batch": 8, "micro": 2, "sp": True}
    check(ranks, layout("gqa2", **how, config={"num_hidden_layers": LAYERS}), "gqa2", MANY)


def evaluated(backend: Backend, resolved: Resolved, weights: dict[str, object]) -> list[float]:
    state = start(backend, resolved, weights)  # type: ignore[arg-type]
    (batch,) = batches(resolved, 1)
    result = eval_step(state, local_batch(state, batch, resolved.config.train.micro_batch))
    read = backend.fetch({f"{i}{j}": value for i, pair in enumerate(result) for j, value in enumerate(pair)})
    return list(read.values())


@pytest.mark.parametrize("virtual_pp", [1, 2])
def test_evaluation_gives_every_rank_the_loss_of_each_micro_batch(ranks: RankPool, virtual_pp: int) -> None:
    config = {"num_hidden_layers": LAYERS}
    alone = layout("gqa2", tp=1, batch=6, micro=2, config=config)
    (want,) = ranks.run(1, evaluated, alone, weights_of(alone))
    resolved = layout("gqa2", tp=2, pp=2, virtual_pp=virtual_pp, batch=6, micro=2, config=config)
    for actual in ranks.run(4, evaluated, resolved, weights_of(resolved)):
        assert actual == pytest.approx(want, rel=1e-6)
