"""Gradients reduced over data parallel ranks in a type: the formula of each way to cut them, and the parts it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.precision import DTYPES
from nxtrain.sharding import Layout
from nxtrain.train.build import build_mesh
from nxtrain.train.step import DeviceBatch
from tests.support.models import changed
from tests.support.parity import Gradient, batches, gradient, layout, start, table_of, whole

Whole = Mapping[str, Tensor]
"""Whole tensors by global name."""


def reducing(shard: str, reduce: str, *, params: str, dp: int, accumulation: int) -> Resolved:
    """A run that reduces in a type; its micro-batches are one sequence, and `dp` does not divide its shapes."""
    size = 2 if shard == "hybrid" else 0
    resolved = layout("odd", tp=1, dp=dp, batch=dp * accumulation, micro=1, params=params, shard=shard, shard_size=size)
    one_type = params == "bf16" and shard in ("grad_op", "full", "hybrid")
    return changed(resolved, precision={"reduce": reduce, "accumulate": reduce if one_type else "fp32"})


def own_gradients(backend: Backend, resolved: Resolved, weights: Whole) -> list[dict[str, Tensor]]:
    """The gradient of each sequence of the global batch, alone on one rank: nothing is reduced."""
    alone = changed(resolved, parallel={"dp": 1, "shard": "none", "shard_size": 0}, train={"global_batch": 1})
    state = start(backend, alone, weights)
    (batch,) = batches(resolved, 1)
    rows = batch[:, None, None]  # each a step of one micro-batch of one sequence
    steps = [gradient(state, DeviceBatch.of(row[..., :-1], row[..., 1:], backend.put)) for row in rows]
    return [whole([of_summed_loss(step, dp=1)], alone) for step in steps]


def of_summed_loss(found: Gradient, dp: int) -> dict[str, Tensor]:
    """Gradients of the sum over a rank's tokens, as they are reduced; exact where numbers of tokens are powers of 2."""
    return {name: grad * (found.num_tokens / dp) for name, grad in found.shards.items()}


def formula(rows: Sequence[Whole], resolved: Resolved) -> dict[str, Tensor]:
    """The reduced gradient of `own_gradients`, each sum rounded to the type that the configuration gives it."""
    precision, parallel = resolved.config.precision, resolved.config.parallel
    reduce, accumulate = DTYPES[precision.reduce], DTYPES[precision.accumulate]
    each = len(rows) // parallel.dp

    def reduced(name: str) -> Tensor:
        ranks = [[row[name] for row in rows[rank * each : (rank + 1) * each]] for rank in range(parallel.dp)]
        if parallel.shard in ("none", "zero1"):
            return _mean([_sum(micro, accumulate) for micro in ranks], reduce)
        if parallel.shard == "hybrid":
            nodes = [zip(*ranks[first : first + 2], strict=True) for first in range(0, parallel.dp, 2)]
            return _mean([_sum([_mean(micro, reduce) for micro in node], reduce) for node in nodes], reduce)
        return _sum([_mean(micro, reduce) for micro in zip(*ranks, strict=True)], accumulate)

    return {name: reduced(name) for name in rows[0]}


def shard_pairs(
    found: Whole, expected: Whole, resolved: Resolved, world: int, rank: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """A rank's entries beside the same ones of the expected whole tensors, in float32, by global name."""
    mesh = build_mesh(resolved, world, rank, world)
    layout_ = Layout(table_of(resolved, mesh), mesh)
    pairs = {}
    for name, blocks in layout_.items():
        for block in blocks:
            key = layout_.table[name].global_name(name, block.segment)
            part = expected[key]
            for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            pairs[key] = block.of(found[name]).float(), part.float()
    return pairs


def _sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    first, *others = (tensor.to(dtype) for tensor in tensors)
    return sum(others, start=first)


def _mean(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return _sum(tensors, dtype) / len(tensors)
