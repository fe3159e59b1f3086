"""Bytes that ranks of a real run send over cp, against the formula of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.mesh import Axis
from nxtrain.config.check import Resolved
from nxtrain.plan.context import context_bytes
from nxtrain.train.step import train_step
from tests.support.memory import job_of
from tests.support.models import weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool


class CountedCollectives(C10dCollectives):
    """Collectives that count the bytes which this rank sends over cp, as rings of neighbours send them."""

    sent = 0

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        self._count(x, axis, hops=min(hops, 1))
        return super().start_shift(x, axis, hops)

    def all_gather(self, x: Tensor, axis: Axis) -> Tensor:
        self._count(x, axis, hops=axis.size - 1)
        return super().all_gather(x, axis)

    def reduce_scatter(self, x: Tensor, axis: Axis) -> Tensor:
        self._count(x[: x.shape[0] // axis.size], axis, hops=axis.size - 1)
        return super().reduce_scatter(x, axis)

    def _count(self, x: Tensor, axis: Axis, hops: int) -> None:
        if axis.name == "cp":
            self.sent += hops * x.numel() * x.element_size()


def sent_in_a_step(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> int:
    """Bytes of this rank in a step."""
    backend.collectives = counted = CountedCollectives(backend.world)
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    return counted.sent


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize(
    "change",
    [
        {"cp": 2, "dp": 1, "remat": "none"},
        {"cp": 3, "dp": 1, "remat": "full", "params": "bf16", "seq_len": 24},
        {"cp": 2, "dp": 1, "tp": 2, "sp": True, "remat": "selective", "params": "bf16", "shard": "zero1"},
    ],
    ids=["two", "three, recomputed, bf16", "tp and zero1"],
)
def test_a_rank_sends_the_planned_bytes_over_cp(ranks: RankPool, method: str, change: dict[str, Any]) -> None:
    resolved = layout("gqa2", cp_method=method, micro=2, batch=4, **{"tp": 1, **change})
    parallel = resolved.config.parallel
    result = ranks.run(parallel.ranks_per_replica * parallel.dp, sent_in_a_step, resolved, weights_of(resolved))
    job = job_of(resolved)
    planned = job.num_micro * sum(context_bytes(job, resolved.dimensions.num_layers))
    assert set(result) == {planned} and planned > 0
