"""Gradients are of the mean over the global batch's tokens, wherever those that count lie.

The reference is transformers on the whole batch in one process, with torch's cross entropy, which averages over the
targets that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.mesh import Axis
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.parallel.data_parallel import Reduction, Replicated
from nxtrain.parallel.grads import Gradients
from tests.support.models import hf_model, our_model, tokens, weights_of
from tests.support.parity import (
    GLOBAL_BATCH,
    batches,
    gradient,
    layout,
    local_batch,
    start,
)
from tests.support.ranks import RankPool

COUNTED = (32, 3, 0, 17)
"""Targets that count in each sequence of the batch: one has all, one has none."""


def masked_targets(targets: Tensor) -> Tensor:
    """(GLOBAL_BATCH, S) targets of which each sequence keeps its last few."""
    counted = torch.tensor(COUNTED).unsqueeze(1)
    return targets.masked_fill(torch.arange(targets.shape[1]) < targets.shape[1] - counted, IGNORE_INDEX)


def expected(resolved: Resolved) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch."""
    model = hf_model(resolved)
    batch = tokens(resolved, GLOBAL_BATCH)
    logits = model(input_ids=batch[:, :-1]).logits
    targets = masked_targets(batch[:, 1:])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_in_small_buckets(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> bool:
    """True if all-reduces of a few tensors each give the bits of one all-reduce of all tensors."""
    state = start(backend, resolved, weights)
    batch = local_batch(state, tokens(resolved, GLOBAL_BATCH), resolved.config.train.micro_batch)
    model = our_model(resolved, backend, state.mesh, weights)
    how = Reduction(state.precision, accumulates=False, bucket_bytes=20_000)
    split = Replicated(dict(model.named_parameters()), state.layout, backend.collectives, how, backend.put)
    assert len(split.buckets) > 5
    gradients = Gradients(split, backend.collectives, backend.put, backend.kernels)
    small = replace(state, model=model, data_parallel=split, gradients=gradients)
    one, many = gradient(state, batch), gradient(small, batch)
    return one.norm == many.norm and all(torch.equal(one.shards[name], many.shards[name]) for name in one.shards)


def test_the_size_of_buckets_changes_no_bit(ranks: RankPool) -> None:
    resolved = layout("gqa2", tp=1, dp=2, micro=2)
    assert all(ranks.run(2, gradient_in_small_buckets, resolved, weights_of(resolved)))


class DividesByWorld(C10dCollectives):
    """Averages gradients over every rank, not over the data parallel ones."""

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        return super().start_all_reduce_bucket(tensors, axis, dtype, self._wrong(scale))

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        return super().start_reduce_scatter(x, axis, self._wrong(scale))

    def _wrong(self, scale: float) -> float:
        return scale if scale == 1.0 else 1.0 / self._world


def norm(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], by_world: bool) -> float:
    """Norm of the gradient, divided right or wrong."""
    if by_world:
        backend.collectives = DividesByWorld(backend.world)
    state = start(backend, resolved, weights)
    for module in state.model.modules():
        if by_world and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(backend.world)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums that scale
    (batch,) = batches(resolved, 1)
    return gradient(state, local_batch(state, batch, resolved.config.train.micro_batch)).norm


@pytest.mark.parametrize(("shard", "dp"), [("none", 2), ("zero1", 2), ("grad_op", 2), ("full", 2), ("hybrid", 4)])
def test_a_gradient_divided_by_the_world_size_would_be_seen(ranks: RankPool, shard: str, dp: int) -> None:
    size = 2 if shard == "hybrid" else 0
    alone, resolved = layout("gqa2", tp=1), layout("gqa2", tp=2, dp=dp, micro=4 // dp, shard=shard, shard_size=size)
    weights = weights_of(alone)
    (expected,) = ranks.run(1, norm, alone, weights, False)
    world = 2 * dp
    assert ranks.run(world, norm, resolved, weights, False) == pytest.approx([expected] * world, rel=1e-5)
    assert ranks.run(world, norm, resolved, weights, True) == pytest.approx([expected / 2] * world, rel=1e-5)
