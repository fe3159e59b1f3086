"""Linear layers whose weight gradient is computed later than that of their input, on one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nxtrain.common.sharding import Init, Segment
from nxtrain.parallel.linear import ColumnLinear, Product, RowLinear, SplitBackward
from tests.support.models import ALONE, alone, filled, random

S, B, IN, OUT = 5, 3, 4, 6


def column() -> SplitBackward:
    return ColumnLinear(IN, (Segment("w", OUT),), Init(), alone(torch.float32))


def row() -> SplitBackward:
    return RowLinear(IN, OUT, Init(), alone(torch.float32))


@pytest.mark.parametrize("make", [column, row])
def test_a_postponed_weight_gradient_is_that_of_torch_in_float64(make: Callable[[], SplitBackward]) -> None:
    weight = random(OUT, IN, seed=1)
    with torch.device("meta"):
        built = make()
    layer = filled(built, ALONE, {"w" if isinstance(built, ColumnLinear) else "": weight})
    products: list[Product] = []
    layer.postpone = products.append
    x, factor = random(S, B, IN).requires_grad_(), random(S, B, OUT, seed=2)
    out: Tensor = layer(x)
    out.backward(factor)
    assert layer.weight.grad is None and len(products) == 1
    x64, weight64 = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    expected = x64 @ weight64.t()
    expected.backward(factor.double())
    actual = (out.detach(), x.grad, products[0]())
    for ours, theirs in zip(actual, (expected.detach(), x64.grad, weight64.grad), strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
