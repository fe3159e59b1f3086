"""Float32 products of 16-bit matrices, in blocks, on drawn shapes and forms of memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from nxtrain.backends import cpu_kernels, cpu_products
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.parallel import products

LENGTHS = (1, 2, 3, 7, 16, 31)
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""


def drawn(rng: Random, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, whose products and sums float32 holds exactly; rows or columns are contiguous."""
    values = [float(rng.randint(-8, 8)) for _ in range(rows * columns)]
    matrix = torch.tensor(values, dtype=dtype)
    return matrix.view(rows, columns) if rng.random() < 0.5 else matrix.view(columns, rows).t()


def seen_error(matmul: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> str:
    """First difference from a float64 product that is rounded once; empty: none in these draws."""
    rng = Random(3)
    for _ in range(150):
        monkeypatch.setattr(products, "BLOCK_ENTRIES", rng.choice((1, 8, 40, 1 << 21)))
        (m, k, n), dtype = (rng.choice(LENGTHS) for _ in range(3)), rng.choice((torch.bfloat16, torch.float16))
        a, b = drawn(rng, m, k, dtype), drawn(rng, k, n, dtype)
        stacked = a.view(m, 1, k) if rng.random() < 0.3 and a.is_contiguous() else a
        found, wanted = matmul(stacked, b, wide=True), (a.double() @ b.double()).to(dtype)
        if found.dtype != dtype or not torch.equal(found.reshape(m, n), wanted):
            return f"{m} x {k} x {n}, {dtype}, blocks of {products.BLOCK_ENTRIES}"
    return ""


def test_a_wide_product_is_the_exact_one_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen_error(products.matmul, monkeypatch)


@pytest.mark.parametrize("defect", ["nothing is written", "one block", "rounded before the sum"])
def test_a_defect_of_blocks_is_seen(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(a: Tensor, b: Tensor, *, wide: bool) -> Tensor:
        size = max(1, a.shape[-1] // 2)
        if defect == "one block":
            return products.matmul(a[..., :size], b[:size], wide=wide)
        if defect == "rounded before the sum":
            first = products.matmul(a[..., :size], b[:size], wide=wide)
            return first + products.matmul(a[..., size:], b[size:], wide=wide)
        return torch.zeros_like(products.matmul(a, b, wide=wide))

    assert seen_error(broken, monkeypatch)


def test_sums_of_a_wide_product_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, half_ulp in HALF_ULP.items():
        a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((9, 700), (700, 5)))
        exact = a.double() @ b.double()
        error = (products.matmul(a, b, wide=True).double() - exact).abs()
        sums = a.double().abs() @ b.double().abs()
        assert (error <= half_ulp * exact.abs() + 1e-6 * sums).all()


def test_a_cpu_without_instructions_computes_attention_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[torch.dtype]()

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q.dtype)
        return q + 0 * (k.sum() + v.sum())

    monkeypatch.setattr(cpu_kernels, "blocked_attention", noted)
    for has_products in (True, False):
        monkeypatch.setattr(cpu_kernels, "has_products", lambda dtype, has=has_products: has or dtype == torch.float32)
        q, k, v = (torch.randn(4, 1, 2, 8, dtype=torch.bfloat16) for _ in range(3))
        assert CpuKernels().attention(q, k, v).dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.float32]


def test_float32_needs_no_copies() -> None:
    assert cpu_products.has_products(torch.float32) and cpu_products.has_products(torch.float64)
    assert not CpuKernels().widens_products(torch.float32)
