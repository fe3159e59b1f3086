"""The CPU's own attention is torch's, forward and backward, at lengths that no block divides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.cpu_attention import blocked_attention, is_short


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length,heads,kv_heads", [(1, 4, 4), (7, 4, 2), (128, 4, 1), (300, 6, 3)])
def test_values_and_gradients_equal_torch(
    length: int, heads: int, kv_heads: int, dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, 2, n, 16) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    out, reference = blocked_attention(*ours), expected(*theirs)
    out.backward(grad)
    reference.backward(grad.double())
    pairs = [(out, reference), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for actual, wanted in pairs:
        assert actual is not None
        assert wanted is not None
        assert (actual.double() - wanted).norm() <= bound * max(1.0, wanted.norm().item())


def test_long_sequences_keep_nothing_quadratic() -> None:
    assert is_short(torch.empty(512, 4, 8, 64, dtype=torch.bfloat16, device="meta"))
    assert not is_short(torch.empty(4096, 1, 8, 64, dtype=torch.bfloat16, device="meta"))
