"""Gradients are reduced in the configured type, however they are cut: operands of collectives, and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import DTYPES
from nxtrain.train.build import build_mesh
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from tests.support.models import changed, weights_of
from tests.support.parity import batches, layout, local_batch, start, table_of, whole
from tests.support.ranks import RankPool

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
    item = len(rows) // parallel.dp

    def reduced(name: str) -> Tensor:
        ranks = [[row[name] for row in rows[rank * item : (rank + 1) * item]] for rank in range(parallel.dp)]
        if parallel.shard in ("none", "zero1"):
            return _mean([_sum(micro, accumulate) for micro in ranks], reduce)
        if parallel.shard == "hybrid":
            nodes = [zip(*ranks[first : first + 2], strict=True) for first in range(0, parallel.dp, 2)]
            return _mean([_sum([_mean(micro, reduce) for micro in node], reduce) for node in nodes], reduce)
        return _sum([_mean(micro, reduce) for micro in zip(*ranks, strict=True)], accumulate)

    return {name: reduced(name) for name in rows[0]}


def shard_pairs(
    actual: Whole, expected: Whole, resolved: Resolved, world: int, rank: int
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
            pairs[key] = block.of(actual[name]).float(), part.float()
    return pairs


def _sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    first, *others = (tensor.to(dtype) for tensor in tensors)
    return sum(others, start=first)


def _mean(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return _sum(tensors, dtype) / len(tensors)


CUTS = [("none", 2), ("zero1", 2), ("grad_op", 2), ("full", 2), ("hybrid", 4)]
CASES = [(shard, dp, "bf16") for shard, dp in CUTS]
CASES += [(shard, dp, "fp32") for shard, dp in CUTS if shard != "hybrid"]  # which sums fp32 gradients in fp32 only
REDUCING = {
    "none": {"allreduce"},
    "zero1": {"reduce_scatter_base"},
    "grad_op": {"reduce_scatter_base"},
    "full": {"reduce_scatter_base"},
    "hybrid": {"reduce_scatter_base", "allreduce"},
}
SCALARS = 2
"""Elements of the largest collective that carries no gradients: the loss with the number of tokens."""


class _Types(TorchDispatchMode):
    """Counts operands of collectives that reduce, by operation and type."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            op = func._schema.name.removeprefix("c10d::").strip("_")
            for tensor in _tensors(args):
                if "reduce" in op and tensor.numel() > SCALARS:
                    self.seen[op, tensor.dtype] += 1
        return func(*args, **(kwargs or {}))


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def gradient_and_types(
    backend: CpuBackend, resolved: Resolved, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Counter[tuple[str, torch.dtype]]]:
    """This rank's part of a reduced gradient, and the operands that the reduction had."""
    backend.choose_transport("gloo")  # torch dispatches what goes through it
    recording = _Types()
    with recording:
        result = reduced_gradient(backend, resolved, weights)
    return result, recording.seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("shard", "dp", "params"), CASES)
def test_collectives_carry_the_type_of_the_reduction_and_give_the_gradients_of_its_formula(
    ranks: RankPool, shard: str, dp: int, params: str, accumulation: int
) -> None:
    """Bit for bit: at most two numbers meet in each sum, and means of 2 and 4 are exact."""
    results = {}
    for reduce in ("fp32", "bf16"):
        resolved = reducing(shard, reduce, params=params, dp=dp, accumulation=accumulation)
        weights = weights_of(resolved)
        (own,) = ranks.run(1, own_gradients, resolved, weights)
        expected = formula(own, resolved)
        results[reduce], seen = zip(*ranks.run(dp, gradient_and_types, resolved, weights), strict=True)
        assert all(set(types) == {(op, DTYPES[reduce]) for op in REDUCING[shard]} for types in seen)
        for rank, gradient in enumerate(results[reduce]):
            pairs = shard_pairs(gradient, expected, resolved, dp, rank)
            for name, (ours, want) in pairs.items():
                assert torch.equal(ours, want), name
    for wide, narrow in zip(results["fp32"], results["bf16"], strict=True):
        for name, shard_ in wide.items():
            if (
                name != "model.embed_tokens.weight"
            ):  # most of its rows are of one rank, whose bf16 numbers no sum rounds
                same = shard_.float() == narrow[name].float()
                assert same.float().mean() < 0.7, name


@pytest.mark.parametrize(("reduce", "buckets"), [("fp32", 3), ("bf16", 2)])
@pytest.mark.parametrize("shard", ["none", "zero1"])
def test_buckets_are_as_large_as_the_reduction_makes_them(
    ranks: RankPool, shard: str, reduce: str, buckets: int
) -> None:
    """Embedding and head have 2 MiB each in fp32: with a limit of 2 MiB the first shares a bucket in bf16 only."""
    resolved = layout("gqa2", tp=1, dp=2, micro=1, shard=shard, config={"vocab_size": 8192})
    resolved = changed(resolved, parallel={"bucket_mib": 2}, precision={"reduce": reduce})
    ((_, seen), _) = ranks.run(2, gradient_and_types, resolved, weights_of(resolved))
    tensors = {"none": 1, "zero1": 2}[shard]  # of the input and the result, where those are two
    assert seen == {(op, DTYPES[reduce]): buckets * tensors for op in REDUCING[shard]}
