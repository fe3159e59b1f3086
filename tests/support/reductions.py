"""Gradients reduced over data parallel ranks in a type: the formula of each way to cut them, and the parts it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import DTYPES
from nxtrain.train.build import build_mesh
from nxtrain.train.step import DeviceBatch, TrainState, train_step
from tests.support.models import changed
from tests.support.parity import batches, layout, local_batch, start, table_of, whole

Whole = Mapping[str, Tensor]
"""Whole tensors by global name."""


def reducing(shard: str, reduce: str, *, params: str, dp: int, accumulation: int) -> Resolved:
    """A run that reduces in a type; its micro-batches are one sequence, and `dp` does not divide its shapes."""
    size = 2 if shard == "hybrid" else 0
    resolved = layout("odd", tp=1, dp=dp, batch=dp * accumulation, micro=1, params=params, shard=shard, shard_size=size)
    one_type = params == "bf16" and shard in ("grad_op", "full", "hybrid")
    return changed(resolved, precision={"reduce": reduce, "accumulate": reduce if one_type else "fp32"})


class _Keeping(AdamW):
    """Keeps the gradients that an update would be made of, on the device."""

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}

    def step(self, grads: Mapping[str, Tensor], lr: Tensor, grad_scale: Tensor, skip: Tensor | None = None) -> None:
        self.grads = {name: grad.detach().clone() for name, grad in grads.items()}


def _gradient(state: TrainState, batch: DeviceBatch) -> dict[str, Tensor]:
    keeping = _Keeping()
    train_step(replace(state, optimizer=keeping), batch, 1e-3)
    state.backend.step_boundary()
    return {name: grad.cpu() for name, grad in keeping.grads.items()}


def reduced_gradient(backend: Backend, resolved: Resolved, weights: Whole) -> dict[str, Tensor]:
    """This rank's part of the gradient of a global batch, as it comes out of the reduction: of losses summed."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    return _gradient(state, local_batch(state, batch, resolved.config.train.micro_batch))


def own_gradients(backend: Backend, resolved: Resolved, weights: Whole) -> list[dict[str, Tensor]]:
    """The same of each sequence of the global batch, alone on one rank: nothing is reduced."""
    alone = changed(resolved, parallel={"dp": 1, "shard": "none", "shard_size": 0}, train={"global_batch": 1})
    state = start(backend, alone, weights)
    (batch,) = batches(resolved, 1)
    rows = batch[:, None, None]  # each a step of one micro-batch of one sequence
    steps = [_gradient(state, DeviceBatch.of(row[..., :-1], row[..., 1:], backend.put)) for row in rows]
    return [whole([step], alone) for step in steps]


def of_each(
    backend: Backend, body: Callable[[Backend, Resolved, Whole], Any], plans: Sequence[Resolved], weights: Whole
) -> list[Any]:
    """One of the above for several runs."""
    return [body(backend, plan, weights) for plan in plans]


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
