"""Linear layers in float8: output, gradient of the input and gradient of the weight are products of float8 matrices.

Model code is unchanged: existing layers of blocks get another product. Weights, gradients and checkpoints keep their
types. Each matrix is scaled by its present magnitudes, then cast, with the dimension that a product sums last. A scale
is one of the whole layer: ranks of tp share the magnitudes of what is cut between them.

Shapes: T tokens of a micro-batch, I inputs, O outputs of this rank; M, K a matrix whose product sums over K.

Source: https://github.com/pytorch/ao at 36027d8, torchao/float8/config.py, for recipes and types. OCP Microscaling
Formats (MX) 1.0 for blocks, whose scales are rounded up as in Mishra et al. 2025 (arXiv:2506.08027).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.distributed.collectives import Done, Pending
from nxtrain.common.family import CausalLM
from nxtrain.common.kernels import Float8Matrix
from nxtrain.parallel.linear import ColumnLinear, Postpone, RowLinear
from nxtrain.parallel.regions import TensorParallel

Recipe: TypeAlias = Literal["tensorwise", "rowwise", "mxfp8"]
"""Sharing of scales: one for a matrix, for a row, or for `BLOCK` entries of a row."""

BLOCK = 32
"""Entries that share a scale of MXFP8."""

SMALLEST = 1e-12
"""Least magnitude by which a matrix is scaled, as in torchao; smaller entries become zeros."""

_EXPONENT = 0x7F800000
"""Bits of the exponent of a float32."""


def multiple(recipe: Recipe) -> int:
    """Number that divides both sizes of a layer in float8."""
    return BLOCK if recipe == "mxfp8" else 16


def use_float8(model: nn.Module, recipe: Recipe | Literal["none"]) -> None:
    """Let the linear layers of a model's blocks multiply in float8, except those whose sizes on a rank do not fit.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        recipe: Sharing of scales; none: all layers keep their products.
    """
    if recipe == "none":
        return
    for block in cast(CausalLM, model).blocks:
        for layer in block.modules():
            if isinstance(layer, ColumnLinear | RowLinear):
                fits = all(size % multiple(recipe) == 0 for size in layer.weight.shape)
                if fits:
                    layer.float8 = Float8Linear(recipe, layer.tp, enters=isinstance(layer, ColumnLinear))
                    layer.is_uniform = False  # a scale is that of the whole sequence


def layers_in_float8(model: nn.Module) -> tuple[int, list[str]]:
    """Number of layers in float8, and names with shapes of those whose sizes do not fit."""
    number, others = 0, dict[str, None]()
    for block in cast(CausalLM, model).blocks:
        for name, layer in block.named_modules():
            if isinstance(layer, ColumnLinear | RowLinear):
                if layer.float8 is not None:
                    number += 1
                else:
                    rows, columns = layer.specs["weight"].local_shape(layer.tp.axis)
                    others[f"{name} ({rows} x {columns})"] = None
    return number, list(others)


@dataclass(frozen=True)
class Float8Linear:
    """Product of a layer's input with its weight, in float8.

    Args:
        recipe: Sharing of scales.
        tp: Tensor parallel context of the layer.
        enters: The layer is a column layer, whose input every rank needs whole; otherwise a row layer.
    """

    recipe: Recipe
    tp: TensorParallel
    enters: bool

    def __call__(self, x: Tensor, weight: Tensor, postpone: Postpone | None) -> Tensor:
        """x @ weight.T: (S/tp, B, I) to (S, B, O) of a column layer, (S, B, I) to (S, B, O) of a row layer."""
        if postpone is not None:
            weight = weight.detach()  # see `linear.py:_SplitProduct`
        out: Tensor = _Float8Product.apply(x, weight, self, postpone)
        return out

    @property
    def grad_type(self) -> torch.dtype:
        """Type of gradients of outputs: with one scale for all entries, range counts more than digits."""
        return torch.float8_e5m2 if self.recipe == "tensorwise" else torch.float8_e4m3fn

    def whole(self, x: Tensor) -> Tensor:
        """The layer's input on every rank that needs it."""
        return self.tp.whole(x) if self.enters else x

    def magnitudes(self, *matrices: tuple[Tensor, bool]) -> list[Tensor]:
        """Largest magnitudes of matrices, (1, 1), (M, 1) or (M, K / 32) float32 each, by the recipe.

        Args:
            matrices: Matrices, and True for those whose scales reach over the parts of other ranks of tp.
        """
        results = [self._magnitudes(matrix) for matrix, _ in matrices]
        shared = [index for index, (_, is_cut) in enumerate(matrices) if is_cut]
        if self.tp.axis.size > 1 and shared and self.recipe != "mxfp8":
            flat = torch.cat([results[index].flatten() for index in shared])
            sizes = [results[index].numel() for index in shared]
            parts = self.tp.comm.all_reduce(flat, self.tp.axis, "max").split(sizes)
            for index, part in zip(shared, parts, strict=True):
                results[index] = part.view_as(results[index])
        return results

    def product(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, grad: bool = False) -> Tensor:
        """Product a @ b.T of matrices with their magnitudes, in the type of the matrices.

        Args:
            grad: `a` is a gradient.
        """
        left = self._cast(*a, self.grad_type if grad else torch.float8_e4m3fn)
        right = self._cast(*b, torch.float8_e4m3fn)
        return self.tp.kernels.float8_matmul(left, right, a[0].dtype, fast=not grad)

    def weight_grad(self, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> Tensor:
        """Gradient of the weight: (..., O), (..., I) to (O, I).

        Args:
            known: Magnitudes of both, if a scale is that of the whole matrix.
        """
        both = [matrix.flatten(0, -2) for matrix in (grad, x)]
        missing = -len(both[0]) % multiple(self.recipe)
        if missing:  # kernels sum over a multiple of tokens
            both = [F.pad(matrix, (0, 0, 0, missing)) for matrix in both]
        left, right = (matrix.t() for matrix in both)
        left_max, right_max = known or self.magnitudes((left, False), (right, False))
        return self.product((left, left_max), (right, right_max), grad=True)

    def _magnitudes(self, matrix: Tensor) -> Tensor:
        if self.recipe == "mxfp8":
            matrix = matrix.unflatten(1, (-1, BLOCK))
        dims = (0, 1) if self.recipe == "tensorwise" else -1
        largest: Tensor = torch.linalg.vector_norm(matrix, torch.inf, dims, keepdim=True, dtype=torch.float32)
        return largest.flatten(1)

    def _cast(self, matrix: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Float8Matrix:
        most = torch.finfo(dtype).max
        # In float64, as in torchao: compilers divide float32 in other ways than eager kernels.
        scales = (most / magnitudes.double().clamp(min=SMALLEST)).float()
        if self.recipe != "tensorwise":
            scales = (scales.view(torch.int32) & _EXPONENT).view(torch.float32)
        if self.recipe == "mxfp8":
            scaled = (matrix.unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
        else:
            scaled = matrix * scales
        # A cast of a larger number is NaN before torch 2.12.
        values = scaled.clamp_(-most, most).to(dtype).contiguous()
        return Float8Matrix(values, scales.double().reciprocal().float())


class _Float8Product(torch.autograd.Function):
    """x @ weight.T in float8. Saved are this rank's slice of the input, the weight, and magnitudes of whole matrices.

    Backward communicates as `linear.py:_ColumnProduct`, or postpones the gradient of the weight as `_SplitProduct`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8Linear, postpone: Postpone | None) -> Tensor:
        whole = how.whole(x)
        flat, of_matrix = whole.flatten(0, -2), how.recipe == "tensorwise"
        # A row of a column layer's weight is whole on one rank; all else that ends in a sum over tp is cut.
        x_max, weight_max = how.magnitudes((flat, not how.enters), (weight, of_matrix or not how.enters))
        ctx.how, ctx.postpone = how, postpone
        is_trained = postpone is not None or weight.requires_grad
        known = (x_max, weight_max) if of_matrix else ()
        ctx.save_for_backward(x if is_trained else None, weight, *known)
        out = how.product((flat, x_max), (weight, weight_max))
        # As torch's own linear: a sum over the ranks may overwrite the result, and autograd allows that of no view.
        return torch.ops.aten._unsafe_view(out, [*whole.shape[:-1], out.shape[1]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, *known = ctx.saved_tensors
        how: Float8Linear = ctx.how
        tp, gathers = how.tp, how.enters and how.tp.sequence_parallel
        flat, turned = grad.flatten(0, -2), weight.t()
        of_grad: list[Tensor] = []  # magnitudes for the gradient of the weight
        if known:
            x_max, weight_max = known
            (grad_max,) = how.magnitudes((flat, how.enters))
            of_grad = [grad_max, x_max]
        else:
            grad_max, weight_max = how.magnitudes((flat, how.enters), (turned, how.enters))
        gathering: Pending[Tensor] = Done(x)
        if gathers and x is not None and ctx.postpone is None:
            gathering = tp.comm.start_all_gather(x.contiguous(), tp.axis)
        x_grad = how.product((flat, grad_max), (turned, weight_max), grad=True).view(*grad.shape[:-1], -1)
        reducing: Pending[Tensor] = Done(x_grad)
        if gathers:
            reducing = tp.comm.start_reduce_scatter(x_grad, tp.axis)
        elif how.enters:
            reducing = tp.comm.start_all_reduce(x_grad, tp.axis)
        weight_grad: Tensor | None = None
        if ctx.postpone is not None:
            ctx.postpone(partial(_postponed, how, grad, x, of_grad))
        elif x is not None:
            weight_grad = how.weight_grad(grad, gathering.wait(), of_grad)
        return reducing.wait(), weight_grad, None, None


def _postponed(how: Float8Linear, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> Tensor:
    return how.weight_grad(grad, how.whole(x), known)
