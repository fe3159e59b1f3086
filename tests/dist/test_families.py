"""Parts that only some families have, cut over tp: every gradient is the unsharded one, and lost sums are seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.parallel.grads import Gradients
from tests.support.models import weights_of
from tests.support.parity import (
    Gradient,
    batches,
    gradient,
    layout,
    local_batch,
    rank_gradient,
    relative_errors,
    start,
    whole,
)
from tests.support.ranks import RankPool

SHAPE = "gqa2"
"""Two K/V heads: of four ranks, two hold each."""

Change = Callable[[str, ShardSpec], ShardSpec]
"""Defect of a parameter's spec, as the sums of gradients see it."""


def norms_of_heads_are_whole(name: str, spec: ShardSpec) -> ShardSpec:
    """A rank takes the gradient of its own heads for that of all."""
    return replace(spec, partial_gradient=False) if name.endswith(("q_norm.weight", "k_norm.weight")) else spec


def biases_are_no_copies(name: str, spec: ShardSpec) -> ShardSpec:
    """A rank takes the gradient of a K/V head's bias by its own queries for that by all."""
    apart = tuple(replace(segment, replicas=1) for segment in spec.segments)
    return replace(spec, segments=apart) if name.endswith(".bias") else spec


def defective(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], change: Change) -> Gradient:
    """Gradient of one global batch on this rank, summed by other specs."""
    state = start(backend, resolved, weights)
    held = state.data_parallel
    held.layout = Layout(ParamTable({name: change(name, spec) for name, spec in state.table.items()}), state.mesh)
    broken = replace(state, gradients=Gradients(held, backend.collectives, backend.put, backend.kernels))
    (batch,) = batches(resolved, 1)
    return gradient(broken, local_batch(broken, batch, resolved.config.train.micro_batch))


@cache
def unsharded(family: str) -> Resolved:
    return layout(SHAPE, tp=1, family=family)


@cache
def expected(backend_pool: RankPool, family: str) -> Gradient:
    actual: list[Gradient] = backend_pool.run(1, rank_gradient, unsharded(family), weights_of(unsharded(family)))
    return actual[0]


def errors(ranks: RankPool, resolved: Resolved, actual: list[Gradient]) -> tuple[dict[str, float], float]:
    """Relative error of every gradient, and of the norm over all."""
    family = resolved.family.name
    want = expected(ranks, family)
    by_name = relative_errors(
        whole([rank.shards for rank in actual], resolved), whole([want.shards], unsharded(family))
    )
    return by_name, max(abs(rank.norm / want.norm - 1) for rank in actual)


@pytest.mark.parametrize(
    ("family", "tp", "sp", "change"),
    [
        ("qwen3", 2, False, norms_of_heads_are_whole),
        ("qwen3", 4, False, norms_of_heads_are_whole),
        ("qwen3", 4, True, norms_of_heads_are_whole),
        ("qwen2", 4, False, biases_are_no_copies),
    ],
)
def test_a_lost_sum_is_seen(ranks: RankPool, family: str, tp: int, sp: bool, change: Change) -> None:
    resolved = layout(SHAPE, tp=tp, sp=sp, family=family, fused_qkv=False)
    by_name, norm = errors(ranks, resolved, ranks.run(tp, defective, resolved, weights_of(resolved), change))
    wrong = {name for name, error in by_name.items() if error > 0.1}
    ends = ("q_norm.weight", "k_norm.weight") if family == "qwen3" else ("k_proj.bias", "v_proj.bias")
    assert wrong == {name for name in by_name if name.endswith(ends)}
    assert norm > 2e-6
