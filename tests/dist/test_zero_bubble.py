"""Postponed weight gradients are those of 1F1B bit for bit: same products, added up in the same order.

The references are our own 1F1B, which `test_pipeline` holds to transformers, and the schedule as data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.parallel.linear import Product
from nxtrain.parallel.schedule import Action, schedule
from nxtrain.parallel.weight_grads import Postponed, WeightGradients
from nxtrain.train.step import eval_step, train_step
from tests.support.models import weights_of
from tests.support.parity import batches, layout, local_batch, run_ours, start
from tests.support.ranks import RankPool

STEPS = 2
"""The second starts from what the first has updated."""

LAYERS = 5
BATCH = {1: 4, 2: 4, 4: 4, 7: 14}
"""Sequences that divide into so many micro-batches, on one and on two data parallel ranks."""


def of(schedule: str, shape: str, num_micro: int, **how: Any) -> Resolved:
    size = BATCH[num_micro]
    micro = size // (num_micro * how.get("dp", 1))
    return layout(shape, schedule=schedule, batch=size, micro=micro, config={"num_hidden_layers": LAYERS}, **how)


def check(ranks: RankPool, shape: str, num_micro: int, **how: Any) -> None:
    world = how["tp"] * how["pp"] * how.get("dp", 1)
    plain = of("1f1b", shape, num_micro, **how)
    weights = weights_of(plain)
    want = ranks.run(world, run_ours, plain, STEPS, weights)
    actual = ranks.run(world, run_ours, of("zero_bubble", shape, num_micro, **how), STEPS, weights)
    for one, other in zip(actual, want, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert one.weights.keys() == other.weights.keys()
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in other.weights)


@pytest.mark.parametrize(("pp", "num_micro"), [*((2, num_micro) for num_micro in BATCH), (4, 2), (4, 7)])
def test_any_number_of_micro_batches(ranks: RankPool, pp: int, num_micro: int) -> None:
    check(ranks, "gqa2", num_micro, tp=1, pp=pp)


def held(backend: Backend, resolved: Resolved, weights: dict[str, Any]) -> tuple[str, int, int]:
    """Work of a rank in order, and its postponed bytes: those of a micro-batch, and the most at once."""
    state = start(backend, resolved, weights)
    pipeline = state.pipeline
    assert pipeline is not None
    assert pipeline._weight_grads is not None
    kept: list[weakref.ref[Product]] = []
    of_micro, most, done = set[int](), 0, list[str]()

    def size(products: list[Any]) -> int:
        return sum(x.nbytes for product in products if product for x in product.args if isinstance(x, torch.Tensor))

    class Seen(WeightGradients):
        def take(self) -> Postponed:
            taken = super().take()
            kept.extend(weakref.ref(product) for _, product in taken)
            of_micro.add(size([product for _, product in taken]))
            return taken

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        nonlocal most
        yield
        most = max(most, size([product() for product in kept]))
        if not action.is_transfer:
            done.append(str(action))

    pipeline._weight_grads, pipeline.watch = Seen(state.model), watch
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    assert not any(product() for product in kept)
    (one,) = of_micro
    return " ".join(done), one, most


@pytest.mark.parametrize(("pp", "num_micro"), [(2, 4), (4, 2), (4, 7)])
def test_what_is_postponed_waits_for_its_turn_and_takes_the_memory_of_the_formula(
    ranks: RankPool, pp: int, num_micro: int
) -> None:
    resolved = of("zero_bubble", "gqa2", num_micro, tp=1, pp=pp)
    result = ranks.run(pp, held, resolved, weights_of(resolved))
    model, train = resolved.model, resolved.config.train
    width, kv = model.hidden_size, model.num_kv_heads * model.head_size  # type: ignore[attr-defined]
    inner = model.intermediate_size  # type: ignore[attr-defined]
    # What enters the four products of a block, and the gradients of what leaves them.
    per_token = (3 * width + inner) + (width + 2 * kv + width + 2 * inner + width)
    actions = schedule(pp, 1, num_micro, "zero_bubble")
    num_blocks = 0
    for rank, (done, of_micro, most) in enumerate(result):
        assert done == " ".join(str(action) for action in actions[rank] if not action.is_transfer)
        blocks, rest = divmod(of_micro, 4 * train.seq_len * train.micro_batch * per_token)
        assert rest == 0
        assert most == min(num_micro, rank + 1) * of_micro
        num_blocks += blocks
    assert num_blocks == LAYERS


def evaluated(backend: Backend, resolved: Resolved, weights: dict[str, Any]) -> list[float]:
    state = start(backend, resolved, weights)
    first, second = (local_batch(state, batch, resolved.config.train.micro_batch) for batch in batches(resolved, 2))
    train_step(state, first, 1e-3)
    sums = [number for pair in eval_step(state, second) for number in pair]
    return list(backend.fetch({str(i): number for i, number in enumerate(sums)}).values())


def test_evaluation_between_steps_postpones_nothing(ranks: RankPool) -> None:
    plain, split = (of(schedule, "gqa2", 4, tp=1, pp=2) for schedule in ("1f1b", "zero_bubble"))
    weights = weights_of(plain)
    assert ranks.run(2, evaluated, split, weights) == ranks.run(2, evaluated, plain, weights)
