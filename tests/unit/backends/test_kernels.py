"""Results of the kernels of every backend, against explicit formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.kernels import Kernels
from tests.support.models import random

KERNELS = {"fused": FusedKernels(), "grouped": CudaKernels(), "plain": PlainKernels()}
EVERY = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)

S, B, H = 12, 2, 8


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention by its formula: each K/V head serves adjacent query heads, no query sees what follows it."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnh,tbnh->bnst", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    return torch.einsum("bnst,tbnh->sbnh", scores.masked_fill(later, float("-inf")).softmax(-1), v)


@EVERY
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_is_causal_and_grouped(kernels: Kernels, num_kv_heads: int) -> None:
    shapes = [(S, B, 4, H), (S, B, num_kv_heads, H), (S, B, num_kv_heads, H)]
    ours = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    out, expected = kernels.attention(*ours), attention(*exact)
    assert out.shape == (S, B, 4, H)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    grad = random(S, B, 4, H, seed=9)
    out.backward(grad)
    expected.backward(grad.double())
    for x, x64 in zip(ours, exact, strict=True):
        assert x.grad is not None and x64.grad is not None
        torch.testing.assert_close(x.grad.double(), x64.grad, rtol=0, atol=3e-6)


@EVERY
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm_and_its_gradients(kernels: Kernels, eps: float) -> None:
    x, weight = random(S, B, 16).requires_grad_(), (1 + 0.3 * random(16, seed=1)).requires_grad_()
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    out = kernels.rms_norm(x, weight, eps)
    expected = x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * weight64
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    grad = random(S, B, 16, seed=2)
    out.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in ((x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=3e-6)


@EVERY
def test_rms_norm_rounds_bf16_once(kernels: Kernels) -> None:
    x, weight = random(S, B, 64, dtype=torch.bfloat16), random(64, seed=1, dtype=torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = kernels.rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last of 8 places, and float32's own rounding beside it.
    assert ((out.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()


@pytest.mark.parametrize(("kernels", "limit"), [(CpuKernels(), 1 << 19), (CudaKernels(), 1 << 26)], ids=["cpu", "cuda"])
def test_an_update_is_cut_into_tiles_that_cover_every_row_once(kernels: Kernels, limit: int) -> None:
    shapes = {"empty": (0, 64), "vector": (7,), "large": (128256, 4096), "row": (2, limit + 1), "last": (3, 5)}
    calls = kernels.tiles(shapes)
    covered: dict[str, list[int]] = {name: [] for name in shapes}
    for rows in (rows for call in calls for rows in call):
        covered[rows.name] += range(rows.start, rows.start + rows.number)
    assert covered == {name: list(range(shape[0])) for name, shape in shapes.items()}
    for call in calls:
        assert call
        entries = sum(rows.number * math.prod(shapes[rows.name][1:]) for rows in call)
        assert entries <= limit or [rows.number for rows in call] == [1]
