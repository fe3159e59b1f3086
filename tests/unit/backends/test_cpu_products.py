"""Float32 products of 16-bit matrices, in blocks, on drawn shapes and forms of memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends import cpu_attention, cpu_kernels, cpu_products
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cpu_products import wide_matmul
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, Segment
from nxtrain.parallel.linear import ColumnLinear
from tests.support.contract import WideKernels
from tests.support.contract_functions import Echo, Ranks

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
        monkeypatch.setattr(cpu_products, "BLOCK_ENTRIES", rng.choice((1, 8, 40, 1 << 21)))
        (m, k, n), dtype = (rng.choice(LENGTHS) for _ in range(3)), rng.choice((torch.bfloat16, torch.float16))
        a, b = drawn(rng, m, k, dtype), drawn(rng, k, n, dtype)
        stacked = a.view(m, 1, k) if rng.random() < 0.3 and a.is_contiguous() else a
        actual, wanted = matmul(stacked, b), (a.double() @ b.double()).to(dtype)
        if actual.dtype != dtype or not torch.equal(actual.reshape(m, n), wanted):
            return f"{m} x {k} x {n}, {dtype}, blocks of {cpu_products.BLOCK_ENTRIES}"
    return ""


def test_a_wide_product_is_the_exact_one_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen_error(wide_matmul, monkeypatch)


def forms(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """A matrix in each form of memory: whole, transposed, and as columns of a wider matrix."""
    wide = torch.randint(-8, 9, (rows, 2 * columns + 1)).to(dtype)
    tall = torch.randint(-8, 9, (columns, 2 * rows + 1)).to(dtype)
    return [
        wide[:, :columns].contiguous(),
        tall[:, :rows].contiguous().t(),
        wide[:, 1 : columns + 1],
        tall[:, :rows].t(),
    ]


def wrong_products(kernels: CpuKernels, dtype: torch.dtype) -> list[str]:
    """Products and gradients that differ from those in float64 by more than their rounding."""
    wrong = []
    for m, k, n in product((1, 2, 37, 160), repeat=3):
        for (i, a), (j, b) in product(enumerate(forms(m, k, dtype)), enumerate(forms(k, n, dtype))):
            x = a.detach().requires_grad_()
            weight = b.detach().t().requires_grad_()
            out = kernels.linear(x, weight)
            grad = forms(m, n, dtype)[(i + j) % 4]
            out.backward(grad)
            exact = a.double() @ b.double()
            pairs = {
                "matmul": (kernels.matmul(a, b), exact),
                "linear": (out, exact),
                "gradient of the input": (x.grad, grad.double() @ b.double().t()),
                "gradient of the weight": (weight.grad, grad.double().t() @ a.double()),
            }
            for name, (actual, wanted) in pairs.items():
                assert actual is not None
                if (actual.double() - wanted).norm() > 0.01 * wanted.norm():
                    wrong.append(f"{name} of {m} x {k} x {n}, strides {a.stride()}, {b.stride()}, {grad.stride()}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_a_column_of_a_wider_matrix_are_right(dtype: torch.dtype) -> None:
    """Adapters of rank 1 on fused projections have such inputs."""
    torch.manual_seed(0)
    assert wrong_products(CpuKernels(), dtype) == []


@pytest.mark.parametrize("defect", ["nothing is written", "one block", "rounded before the sum"])
def test_a_defect_of_blocks_is_seen(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(a: Tensor, b: Tensor) -> Tensor:
        size = max(1, a.shape[-1] // 2)
        if defect == "one block":
            return wide_matmul(a[..., :size], b[:size])
        if defect == "rounded before the sum":
            first = wide_matmul(a[..., :size], b[:size])
            return first + wide_matmul(a[..., size:], b[size:])
        return torch.zeros_like(wide_matmul(a, b))

    assert seen_error(broken, monkeypatch)


def test_sums_of_a_wide_product_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, half_ulp in HALF_ULP.items():
        a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((9, 700), (700, 5)))
        exact = a.double() @ b.double()
        error = (wide_matmul(a, b).double() - exact).abs()
        sums = a.double().abs() @ b.double().abs()
        assert (error <= half_ulp * exact.abs() + 1e-6 * sums).all()


class Multiplied(TorchDispatchMode):
    """Types of the matrices that torch multiplies, by any kernel of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.types = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("bmm", "flash_attention")):
            self.types.update(x.dtype for x in args if isinstance(x, Tensor) and x.dtype != torch.float32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("has_products", [True, False])
def test_a_cpu_without_instructions_multiplies_no_16_bit_matrices_in_attention(
    has_products: bool, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu_kernels, cpu_attention):
        monkeypatch.setattr(module, "has_products", lambda dtype: has_products or dtype == torch.float32)
    monkeypatch.setattr(cpu_kernels, "is_short", lambda q: is_short)
    q, k, v = (torch.randn(8, 1, n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    with Multiplied() as seen:
        out = CpuKernels().attention(q, k, v)
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert seen.types == ({torch.bfloat16} if has_products else set())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compilers_trace_products_and_attention_without_a_break(dtype: torch.dtype) -> None:
    kernels = WideKernels()

    def block(x: Tensor, weight: Tensor) -> Tensor:
        heads = kernels.linear(x, weight).unflatten(-1, (2, 8))
        return kernels.matmul(kernels.attention(heads, heads, heads).flatten(2), weight)

    x, weight = torch.randn(8, 1, 12).to(dtype), torch.randn(16, 12).to(dtype)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), block(x, weight), rtol=0.02, atol=0.02)


def test_float32_needs_no_copies() -> None:
    assert cpu_products.has_products(torch.float32) and cpu_products.has_products(torch.float64)
    assert not CpuKernels().widens(torch.float32)


def test_a_cpu_without_instructions_saves_no_float32_copy_for_backward() -> None:
    x = torch.randn(5, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        WideKernels().linear(x, weight)
    assert saved == [torch.bfloat16, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize("rank", [0, 1])
def test_compilers_trace_a_sharded_layer_whose_products_are_in_float32(rank: int) -> None:
    ranks = Ranks(Echo(), Mesh.build(2, rank, tp=2).tp)
    layer = ColumnLinear(4, (Segment("w", 6),), Init(), ranks.parallel(torch.bfloat16, False, WideKernels()))
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(5, 2, 4, dtype=torch.bfloat16, requires_grad=True)

    def grads(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = forward(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, layer.weight))]

    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(grads(compiled), grads(layer.forward), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.02)
