"""Float8 by its definition: numbers of few bits, scales by the largest magnitude, and products of what is left.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) for the numbers; OCP Microscaling Formats (MX) 1.0 for blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch
from torch import Tensor

from nxtrain.common.kernels import Float8Matrix, Kernels
from nxtrain.parallel.float8 import Float8Linear, Recipe
from nxtrain.parallel.linear import Product
from tests.support.contract import CONTIGUOUS, Operand, Shape, Update, Work, compare

RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "mxfp8")


@dataclass(frozen=True)
class Numbers:
    """Numbers of a float8 type."""

    mantissa_bits: int
    least_exponent: int
    most: float

    def nearest(self, x: Tensor) -> Tensor:
        """Nearest number of each entry, the even one of two, and the largest for what lies beyond."""
        exponents = (torch.frexp(x).exponent - 1).clamp(min=self.least_exponent)
        quantum = torch.exp2((exponents - self.mantissa_bits).double())
        return ((x / quantum).round() * quantum).clamp(-self.most, self.most)


E4M3, E5M2 = Numbers(3, -6, 448.0), Numbers(2, -14, 57344.0)


def quantized(matrix: Tensor, recipe: str, numbers: Numbers = E4M3, whole: Tensor | None = None) -> Tensor:
    """Float64 values that a matrix has in float8, whose products sum over its columns.

    Args:
        whole: Matrix over all ranks, by whose rows or entries the matrix is scaled; None: the matrix.
    """
    rows, columns = matrix.shape
    of_scale = {"tensorwise": 0, "rowwise": columns, "mxfp8": 32}[recipe]
    if not of_scale:
        largest = (matrix if whole is None else whole).abs().max().expand(rows, columns)
    elif recipe == "rowwise" and whole is not None:
        largest = whole.abs().amax(1, keepdim=True).expand(rows, columns)
    else:
        padded = torch.nn.functional.pad(matrix.abs(), (0, -columns % of_scale))
        blocks = padded.view(rows, -1, of_scale).amax(2)
        largest = blocks.repeat_interleave(of_scale, 1)[:, :columns]
    scales = (numbers.most / largest.double().clamp(min=1e-12)).float().double()
    if recipe != "tensorwise":
        scales = torch.exp2(torch.frexp(scales).exponent.double() - 1)
    scaled = (matrix.float() * scales.float()).double()
    return numbers.nearest(scaled) / scales


class Exact(torch.autograd.Function):
    """x @ weight.T and its gradients, each as a product of quantized matrices in float64: (..., I), (O, I)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        flat = x.detach().flatten(0, -2)
        return (quantized(flat, recipe) @ quantized(weight, recipe).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        numbers = E5M2 if ctx.recipe == "tensorwise" else E4M3
        g, flat = grad.flatten(0, -2), x.flatten(0, -2)
        x_grad = quantized(g, ctx.recipe, numbers) @ quantized(weight.t(), ctx.recipe).t()
        weight_grad = quantized(g.t(), ctx.recipe, numbers) @ quantized(flat.t(), ctx.recipe).t()
        return x_grad.view_as(x), weight_grad, None


def float8_product(ranks: Any, rng: Random) -> Work:
    """A product in float8, of a column or a row layer, whose weight may get its gradient later."""
    recipe, enters, postpones = rng.choice(RECIPES), rng.random() < 0.5, rng.random() < 0.3
    tp = ranks.parallel(torch.float32, rng.random() < 0.5, None)
    how = Float8Linear(recipe, tp, enters)
    shape, rows = ranks.draw_shape(rng, rng.choice((32, 64))), rng.choice((32, 96))
    postponed: list[Product] = []

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return how(x, weight, postponed.append if postpones else None)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        if enters:
            x = ranks.heard(x)
            x = ranks.gathered(x) if tp.sequence_parallel else x
        return cast(Tensor, Exact.apply(x, weight, recipe))

    operands = {"x": Operand(shape, always=postpones), "weight": Operand((rows, shape[-1]))}
    later = (lambda: {"weight": postponed.pop()()}) if postpones else None
    label = f"_Float8Product {recipe} on {shape} and {rows} rows, entering {enters}, {tp}"
    return Work(label, operands, call, exact, later=later)


def float8_matmul(kernels: Kernels, rng: Random) -> Update:
    """A product of float8 matrices with scales of their own."""
    m, n, blocks = rng.choice((1, 3)), rng.choice((16, 32)), rng.choice((2, 3))
    columns = rng.choice((1, blocks))
    found: list[Tensor] = []

    def call(*given: Tensor) -> None:
        a, b = Float8Matrix(*given[:2]), Float8Matrix(*given[2:])
        found.append(kernels.float8_matmul(a, b, torch.float32))

    def check(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        wide = [before[name].double() * before[f"{name} scales"].repeat_interleave(width, 1) for name in "ab"]
        compare("the product", found.pop(), wide[0] @ wide[1].t(), torch.float32)

    def scales(generator: torch.Generator, shape: Shape) -> Tensor:
        return torch.exp2(torch.randint(-3, 3, shape, generator=generator).float())

    width = blocks * 32 // columns
    operands: dict[str, Operand] = {}
    for name, rows in (("a", m), ("b", n)):
        operands[name] = Operand((rows, blocks * 32), dtype=torch.float8_e4m3fn, forms=CONTIGUOUS)
        operands[f"{name} scales"] = Operand((rows, columns), scales, torch.float32, CONTIGUOUS)
    return Update(f"float8_matmul of {type(kernels).__name__} on {(m, n, blocks, columns)}", operands, call, check)


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference as a part of the norm of what is wanted."""
    scale: float = wanted.double().norm().item()
    error: float = (found.double() - wanted).norm().item()
    return error / (scale or math.inf)
