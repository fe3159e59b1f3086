"""Sums, norms and clipping of gradients on one rank; the lane of several ranks is tests/dist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.c10d import C10dCollectives
from nxtrain.mesh import Mesh
from nxtrain.parallel.grads import Gradients, SquareSum, clip_factor
from nxtrain.sharding import ParamTable, Segment, ShardSpec
from tests.support.layers import random


def host(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("limit", [0.5, 1.0, 100.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))]
    for seed, parameter in enumerate(parameters):
        parameter.grad = random(*parameter.shape, seed=seed)
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
        "row": ShardSpec((3, 10), dim=1),
        "vocab": ShardSpec((9, 3), dim=0),
    }
)
"""A replicated norm, K/V heads that two of four ranks share, and cuts with padding."""


def whole_tensors() -> dict[str, dict[str, Tensor]]:
    return {
        name: {s.name: random(*spec.global_shape(s), seed=i) for i, s in enumerate(spec.segments)}
        for name, spec in TABLE.items()
    }


@pytest.mark.parametrize("tp", [1, 4])
def test_the_ranks_together_count_every_entry_once(tp: int) -> None:
    whole = whole_tensors()
    expected = sum(t.double().square().sum().item() for tensors in whole.values() for t in tensors.values())
    total = 0.0
    for rank in range(tp):
        specs = ParamTable(
            {
                name: spec
                if tp > 1
                else ShardSpec(spec.shape, spec.dim, tuple(Segment(s.name, s.size) for s in spec.segments))
                for name, spec in TABLE.items()
            }
        )
        axis = Mesh.build(tp, rank, tp=tp).tp
        total += SquareSum(specs, axis, host)({n: specs[n].shard(whole[n], axis) for n in specs}).item()
    assert total == pytest.approx(expected, rel=1e-6)


def test_nxd_4_9_the_norm_of_bf16_gradients_is_summed_in_float32() -> None:
    """NxD 4.9: a sum of squares in bf16 stands still as soon as the next square is less than half its last digit."""
    table = ParamTable({"w": ShardSpec((4096,))})
    grads = {"w": torch.full((4096,), 0.01, dtype=torch.bfloat16)}
    squares = SquareSum(table, Mesh.build(1, 0).tp, host)(grads)
    assert squares.dtype == torch.float32
    assert squares.item() == pytest.approx(4096 * grads["w"][0].double().item() ** 2, rel=1e-6)


def sums_of(dtype: torch.dtype, num_micro: int) -> Tensor:
    """Gradients of one bf16 parameter over micro-batches of 1 and then of ones that bf16 would lose beside it."""
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    gradients = Gradients(
        {"w": parameter},
        ParamTable({"w": ShardSpec((4,))}),
        Mesh.build(1, 0),
        C10dCollectives(1),
        host,
        dtype=dtype,
        num_micro=num_micro,
    )
    for _ in range(2):  # the second step must not see the first
        gradients.clear()
        for micro in range(num_micro):
            (parameter * (1.0 if micro == 0 else 2**-10)).sum().backward()
    return gradients.reduce()["w"]


def test_micro_batches_are_summed_in_the_type_of_the_reduction() -> None:
    assert torch.equal(sums_of(torch.float32, 9), torch.full((4,), 1.0 + 8 * 2**-10))
    assert torch.equal(sums_of(torch.bfloat16, 9), torch.ones(4, dtype=torch.bfloat16))


def test_a_single_micro_batch_needs_no_sums_beside_autograd() -> None:
    assert sums_of(torch.float32, 1).dtype == torch.bfloat16
