"""Postponed weight gradients are those of 1F1B bit for bit: same products, added up in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from tests.support.models import weights_of
from tests.support.parity import batches, layout, local_batch, run_ours, start
from tests.support.ranks import RankPool

STEPS = 3
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
    found = ranks.run(world, run_ours, of("zero_bubble", shape, num_micro, **how), STEPS, weights)
    for one, other in zip(found, want, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert one.weights.keys() == other.weights.keys()
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in other.weights)


@pytest.mark.parametrize("num_micro", [1, 2, 4, 7])
@pytest.mark.parametrize("pp", [2, 4])
def test_any_number_of_micro_batches(ranks: RankPool, pp: int, num_micro: int) -> None:
    check(ranks, "gqa2", num_micro, tp=1, pp=pp)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ("gqa2", {"tp": 2, "sp": False, "remat": "selective"}),
        ("odd", {"tp": 2, "sp": True, "remat": "full"}),
        ("odd", {"tp": 2, "sp": True, "dp": 2, "shard": "zero1"}),
        ("tied", {"tp": 1, "dp": 2, "remat": "full"}),
    ],
)
def test_everything_composes(ranks: RankPool, shape: str, how: dict[str, Any], params: str) -> None:
    check(ranks, shape, 4 if "dp" not in how else 2, pp=2, params=params, **how)
