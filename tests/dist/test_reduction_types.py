"""Gradients are reduced in the configured type, however they are cut: operands of collectives, and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.cpu import CpuBackend
from nxtrain.config.check import Resolved
from nxtrain.parallel.precision import DTYPES
from tests.support.models import changed, weights_of
from tests.support.parity import layout
from tests.support.ranks import RankPool
from tests.support.reductions import formula, own_gradients, reduced_gradient, reducing, shard_pairs

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
        found = reduced_gradient(backend, resolved, weights)
    return found, recording.seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("shard", "dp", "params"), CASES)
def test_collectives_carry_the_type_of_the_reduction_and_give_the_gradients_of_its_formula(
    ranks: RankPool, shard: str, dp: int, params: str, accumulation: int
) -> None:
    """Bit for bit: at most two numbers meet in each sum, and means of 2 and 4 are exact."""
    found = {}
    for reduce in ("fp32", "bf16"):
        resolved = reducing(shard, reduce, params=params, dp=dp, accumulation=accumulation)
        weights = weights_of(resolved)
        (own,) = ranks.run(1, own_gradients, resolved, weights)
        expected = formula(own, resolved)
        found[reduce], seen = zip(*ranks.run(dp, gradient_and_types, resolved, weights), strict=True)
        assert all(set(types) == {(op, DTYPES[reduce]) for op in REDUCING[shard]} for types in seen)
        for rank, gradient in enumerate(found[reduce]):
            pairs = shard_pairs(gradient, expected, resolved, dp, rank)
            for name, (ours, want) in pairs.items():
                assert torch.equal(ours, want), name
    for wide, narrow in zip(found["fp32"], found["bf16"], strict=True):
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
