"""Sums, norms and clipping of gradients on one rank; the lane of several ranks is tests/dist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Binding
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Collectives, Done, Pending
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Layout, ParamTable, Segment, ShardSpec, row_cut
from nxtrain.parallel.data_parallel import Reduction, Replicated, fill_buckets
from nxtrain.parallel.grads import SquareSum, clip_factor
from nxtrain.parallel.precision import Precision
from tests.support.models import random


def host(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(("limit", "scale"), [(0.5, 1.0), (1.0, 1.0), (100.0, 1.0), (1e-6, 1e-6)])
def test_clipping_is_that_of_torch(limit: float, scale: float) -> None:
    """Of small gradients too, beside whose norm the number added to it counts."""
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))]
    for seed, parameter in enumerate(parameters):
        parameter.grad = random(*parameter.shape, seed=seed) * scale
    grads = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert torch.nn.utils.clip_grad_norm_(parameters, limit).item() == pytest.approx(norm.item(), rel=1e-6)
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(grad * clip_factor(norm, limit), parameter.grad, rtol=1e-6, atol=0)


def test_a_limit_of_zero_clips_nothing() -> None:
    assert clip_factor(torch.tensor(1e6), 0.0).item() == 1.0


TABLE = ParamTable(
    {
        "norm": ShardSpec((6,)),
        "qkv": ShardSpec((16, 3), dim=0, segments=(Segment("q", 8), Segment("k", 4, 2), Segment("v", 4, 2))),
        "bias": ShardSpec((16,), dim=0, segments=(Segment("q", 8), Segment("k", 4, 2), Segment("v", 4, 2))),
        "row": ShardSpec((3, 10), dim=1),
        "vocab": ShardSpec((9, 3), dim=0),
    }
)
"""A replicated norm, K/V heads that two of four ranks share with their biases, and cuts with padding."""


def whole_tensors() -> dict[str, dict[str, Tensor]]:
    return {
        name: {s.name: random(*spec.global_shape(s), seed=i) for i, s in enumerate(spec.segments)}
        for name, spec in TABLE.items()
    }


@pytest.mark.parametrize("shard", [1, 3])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_ranks_together_count_every_entry_once(tp: int, shard: int) -> None:
    whole = whole_tensors()
    expected = sum(t.double().square().sum().item() for tensors in whole.values() for t in tensors.values())
    total = 0.0
    for rank in range(tp * shard):
        mesh = Mesh.build(tp * shard, rank, tp=tp, shard=shard)
        layout = Layout(TABLE if tp > 1 else unshared(TABLE), mesh)
        shards = {name: spec.shard(whole[name], mesh.tp) for name, spec in layout.table.items()}
        rows = {name: t.narrow(0, *row_cut(t.shape[0], mesh.shard)) for name, t in shards.items()}
        total += SquareSum(layout, rows, host, FusedKernels())(rows.items()).item()
    assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_bf16", [0, 2, 5])
@pytest.mark.parametrize("rank", range(4))
def test_sums_of_lists_are_those_of_one_tensor_after_the_other(rank: int, num_bf16: int) -> None:
    """Lists of a type of their own, tensors without rows among them, and rows that some ranks hold too."""
    layout = Layout(TABLE, Mesh.build(4, rank, tp=4))
    whole = whole_tensors()
    shards = {name: spec.shard(whole[name], layout.mesh.tp) for name, spec in TABLE.items()}
    for name in [*shards][::-1][:num_bf16]:
        shards[name] = shards[name].bfloat16()
    expected = SquareSum(layout, shards, host, FusedKernels()).of(shards)
    actual = SquareSum(layout, shards, host, CudaKernels()).of(shards)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)


def unshared(table: ParamTable) -> ParamTable:
    """The same model on ranks that are few enough for every K/V head."""
    return ParamTable(
        {
            name: replace(spec, segments=tuple(replace(segment, replicas=1) for segment in spec.segments))
            for name, spec in table.items()
        }
    )


def test_nxd_4_9_the_norm_of_bf16_gradients_is_summed_in_float32() -> None:
    """NxD 4.9: a sum of squares in bf16 stands still as soon as the next square is less than half its last digit."""
    grads = {"w": torch.full((4096,), 0.01, dtype=torch.bfloat16)}
    layout = Layout(ParamTable({"w": ShardSpec((4096,))}), Mesh.build(1, 0))
    squares = SquareSum(layout, grads, host, FusedKernels())(grads.items())
    assert squares.dtype == torch.float32
    assert squares.item() == pytest.approx(4096 * grads["w"][0].double().item() ** 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32000, 256), (1823, 51), (64, 28672), (16384,)])
def test_the_sum_of_millions_of_small_squares_loses_none(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Beside one large row, as an embedding's gradient has; torch's norm of the whole is up to 0.3% off."""
    grad = random(*shape, scale=1e-3)
    grad[7] = 0.1
    grads = {"w": grad.to(dtype)}
    layout = Layout(ParamTable({"w": ShardSpec(shape)}), Mesh.build(1, 0))
    squares = SquareSum(layout, grads, host, FusedKernels())(grads.items())
    assert squares.item() == pytest.approx(grads["w"].double().square().sum().item(), rel=2e-6)


def sums_of(accumulate: torch.dtype, num_micro: int) -> Tensor:
    """Gradients of one bf16 parameter over micro-batches of 1 and then of ones that bf16 would lose beside it."""
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    layout = Layout(ParamTable({"w": ShardSpec((4,))}), Mesh.build(1, 0))
    precision = Precision(torch.bfloat16, accumulate, torch.float32, "fp32_master", torch.float32)
    how = Reduction(precision, num_micro > 1, 1 << 20)
    ranks = Replicated({"w": parameter}, layout, C10dCollectives(1), how, lambda host: host)
    for _ in range(2):  # the second step must not see the first
        for micro in range(num_micro):
            ranks.begin(last=micro == num_micro - 1)
            (parameter * (1.0 if micro == 0 else 2**-10)).sum().backward()
        grads = ranks.reduce()
    return grads["w"]


def test_micro_batches_are_summed_in_the_type_of_the_configuration() -> None:
    assert torch.equal(sums_of(torch.float32, 9), torch.full((4,), 1.0 + 8 * 2**-10))
    assert torch.equal(sums_of(torch.bfloat16, 9), torch.ones(4, dtype=torch.bfloat16))


def test_a_single_micro_batch_needs_no_sums_beside_autograd() -> None:
    assert sums_of(torch.float32, 1).dtype == torch.bfloat16


class _Recording(Binding):
    """A library that averages gradients: it records the axis and the type, and gives twos."""

    def __init__(self) -> None:
        self.calls: list[tuple[Axis, torch.dtype]] = []

    def start_average(
        self, grads: Sequence[Tensor], dp: Axis, dtype: torch.dtype, comm: Collectives
    ) -> Pending[list[Tensor]]:
        self.calls.append((dp, dtype))
        return Done([torch.full_like(grad, 2.0, dtype=dtype) for grad in grads])


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_a_library_that_averages_gradients_is_asked_to_and_its_result_is_taken(reduce: torch.dtype) -> None:
    parameter, binding, mesh = nn.Parameter(torch.zeros(4)), _Recording(), Mesh.build(2, 0)
    precision = Precision(torch.float32, torch.float32, reduce, "fp32", torch.float32)
    layout = Layout(ParamTable({"w": ShardSpec((4,))}), mesh)
    how = Reduction(precision, False, 1 << 20)
    ranks = Replicated({"w": parameter}, layout, C10dCollectives(2), how, host, binding)
    ranks.begin(last=True)
    parameter.sum().backward()
    assert torch.equal(ranks.reduce()["w"], torch.full((4,), 2.0, dtype=reduce))
    assert binding.calls == [(mesh.dp, reduce)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [["a"], ["b"], ["c"], ["d"]]), (10, [["a", "b"], ["c"], ["d"]]), (100, [["a", "b", "c", "d"]])],
)
def test_buckets_are_neighbours_up_to_a_size(limit: int, expected: list[list[str]]) -> None:
    assert fill_buckets({"a": 6, "b": 4, "c": 20, "d": 3}, limit) == expected
