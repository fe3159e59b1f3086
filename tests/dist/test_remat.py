"""Recomputation on several ranks: not a bit changes, and what is communicated again is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Op, Pending
from nxtrain.common.mesh import Axis
from nxtrain.config.check import Resolved
from tests.support.models import weights_of
from tests.support.parity import GLOBAL_BATCH, layout, rank_gradient, run_ours
from tests.support.ranks import RankPool

POLICIES = ("none", "selective", "full")
STEPS = 2
"""The second starts from what the first has updated."""


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("sp", [False, True])
def test_recomputed_gradients_over_tp_are_equal_bit_for_bit(either: RankPool, sp: bool, params: str) -> None:
    results = {}
    for remat in POLICIES:
        resolved = layout("gqa2", tp=2, sp=sp, micro=2, params=params, remat=remat)
        results[remat] = either.run(2, rank_gradient, resolved, weights_of(resolved))
    for remat in POLICIES[1:]:
        for rank, want in zip(results[remat], results["none"], strict=True):
            assert (rank.loss, rank.norm) == (want.loss, want.norm)
            assert_equal_bits(rank.shards, want.shards)


@pytest.mark.parametrize(
    ("shard", "tp", "dp"),
    [("none", 1, 2), ("zero1", 1, 2), ("grad_op", 1, 2), ("full", 1, 2), ("full", 2, 2), ("hybrid", 1, 4)],
)
def test_recomputed_runs_over_dp_are_equal_bit_for_bit(ranks: RankPool, shard: str, tp: int, dp: int) -> None:
    size = 2 if shard == "hybrid" else 0
    results = {}
    for remat in POLICIES:
        resolved = layout("gqa2", tp=tp, dp=dp, sp=tp > 1, micro=1, shard=shard, shard_size=size, remat=remat)
        results[remat] = ranks.run(tp * dp, run_ours, resolved, STEPS, weights_of(resolved))
    for remat in POLICIES[1:]:
        for rank, want in zip(results[remat], results["none"], strict=True):
            assert (rank.losses, rank.norms) == (want.losses, want.norms)
            assert_equal_bits(rank.weights, want.weights)


class Counting(C10dCollectives):
    """Counts what is started on the tensor parallel axis."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.started: Counter[str] = Counter()

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        self.started["all-reduce"] += axis.name == "tp"
        return super().start_all_reduce(x, axis, op)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        self.started["all-gather"] += axis.name == "tp"
        return super().start_all_gather(x, axis)

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        self.started["reduce-scatter"] += axis.name == "tp"
        return super().start_reduce_scatter(x, axis, scale)


def started(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> dict[str, int]:
    backend.collectives = counting = Counting(backend.world)
    rank_gradient(backend, resolved, weights)
    return dict(counting.started)


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("sp", [False, True])
def test_a_block_communicates_again_all_but_its_last_sum(ranks: RankPool, sp: bool, micro: int) -> None:
    more: dict[str, Any] = {}
    for remat in POLICIES:
        resolved = layout("gqa2", tp=2, sp=sp, micro=micro, remat=remat)
        counts = ranks.run(2, started, resolved, weights_of(resolved))
        assert counts[0] == counts[1]
        more[remat] = Counter(counts[0])
    blocks = 2 * (GLOBAL_BATCH // micro)  # in all micro-batches
    # Attention sums over the ranks in the middle of a block. The sum at its end is not needed for any gradient.
    again = {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 0} if sp else {"all-reduce": 1}
    assert more["selective"] == more["none"]
    assert more["full"] == more["none"] + Counter({kind: blocks * number for kind, number in again.items()})


def assert_equal_bits(actual: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert actual.keys() == want.keys()
    assert [name for name in want if not torch.equal(actual[name], want[name])] == []
