"""Linear layers in float8: output, input gradient and weight gradient are products of float8 matrices.

Model code is unchanged: existing linear layers of blocks get a float8 product. Weights, gradients and checkpoints keep
their types. Each matrix is scaled by its current largest magnitudes and cast to float8 before each product (dynamic
scaling). The cast matrix is contiguous along the dimension over which the product sums. A scale belongs to the
unsharded layer: tp ranks reduce the magnitudes of sharded matrices together.

Shapes: T tokens of a micro-batch, I inputs, O outputs of this rank; M, K a matrix whose product sums over K.

Source: https://github.com/pytorch/ao at 36027d8, torchao/float8/config.py, for recipes and types. OCP Microscaling
Formats (MX) 1.0 for blocks; their scales are rounded up as in Mishra et al. 2025 (arXiv:2506.08027).
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
"""Granularity of float8 scales: one for a matrix, for a row, or for `BLOCK` entries of a row."""

BLOCK = 32
"""Number of entries that share a scale in MXFP8."""

SMALLEST = 1e-12
"""Least magnitude by which a float8 matrix is scaled, as in torchao; smaller entries become zeros."""

_EXPONENT = 0x7F800000
"""Bit mask of the exponent of a float32."""


def multiple(recipe: Recipe) -> int:
    """Number that must divide both sizes of a linear layer in float8."""
    return BLOCK if recipe == "mxfp8" else 16


def use_float8(model: nn.Module, recipe: Recipe | Literal["none"]) -> None:
    """Make the linear layers of a model's blocks multiply in float8, except layers whose sizes on a rank do not fit.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        recipe: Granularity of scales; `none` leaves all layers unchanged.
    """
    if recipe == "none":
        return
    for block in cast(CausalLM, model).blocks:
        for layer in block.modules():
            if isinstance(layer, ColumnLinear | RowLinear):
                fits = all(size % multiple(recipe) == 0 for size in layer.weight.shape)
                if fits:
                    layer.float8 = Float8Linear(recipe, layer.tp, enters=isinstance(layer, ColumnLinear))
                    layer.is_uniform = False  # a scale depends on the whole sequence


def layers_in_float8(model: nn.Module) -> tuple[int, list[str]]:
    """Number of layers in float8, and names with shapes of the linear layers whose sizes do not fit."""
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
        recipe: Granularity of scales.
        tp: Tensor parallel context of the layer.
        enters: True for a column layer, whose input every rank needs whole; False for a row layer.
    """

    recipe: Recipe
    tp: TensorParallel
    enters: bool

    def __call__(self, x: Tensor, weight: Tensor, postpone: Postpone | None) -> Tensor:
        """Compute x @ weight.T: (S/tp, B, I) to (S, B, O) in a column layer, (S, B, I) to (S, B, O) in a row layer."""
        if postpone is not None:
            weight = weight.detach()  # see `linear.py:_SplitProduct`
        out: Tensor = _Float8Product.apply(x, weight, self, postpone)
        return out

    @property
    def grad_type(self) -> torch.dtype:
        """Float8 type of output gradients: e5m2 with one scale per matrix, which needs range, otherwise e4m3."""
        return torch.float8_e5m2 if self.recipe == "tensorwise" else torch.float8_e4m3fn

    def whole(self, x: Tensor) -> Tensor:
        """Gather the input of a column layer over tp; return the input of a row layer unchanged."""
        return self.tp.whole(x) if self.enters else x

    def magnitudes(self, *matrices: tuple[Tensor, bool]) -> list[Tensor]:
        """Largest magnitudes of matrices as the recipe groups them: (1, 1), (M, 1) or (M, K / 32) float32 each.

        Args:
            matrices: Matrices, each with True if its scales cover the shards of other tp ranks too.
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
        """Product a @ b.T in float8 of matrices with their magnitudes; the result has the type of `a` before the cast.

        Args:
            a, b: Matrix and its magnitudes, each.
            grad: True if `a` is a gradient.
        """
        left = self._cast(*a, self.grad_type if grad else torch.float8_e4m3fn)
        right = self._cast(*b, torch.float8_e4m3fn)
        return self.tp.kernels.float8_matmul(left, right, a[0].dtype, fast=not grad)

    def weight_grad(self, grad: Tensor, x: Tensor, known: Sequence[Tensor]) -> Tensor:
        """Gradient of the weight, computed by a float8 product: (..., O), (..., I) to (O, I).

        Args:
            grad: (..., O) gradient of the output.
            x: (..., I) input.
            known: Magnitudes of `grad` and `x` if a scale covers the whole matrix, else empty.
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
        # In float64, as in torchao, since compilers and eager kernels divide float32 differently.
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
    """Autograd function of x @ weight.T in float8.

    Saved for backward are this rank's slice of the input, the weight, and magnitudes of whole matrices. Backward
    communicates as `linear.py:_ColumnProduct` does, or postpones the weight gradient as `_SplitProduct` does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8Linear, postpone: Postpone | None) -> Tensor:
        whole = how.whole(x)
        flat, of_matrix = whole.flatten(0, -2), how.recipe == "tensorwise"
        # A row of a column layer's weight is whole on one rank. All other matrices of sums over tp are sharded.
        x_max, weight_max = how.magnitudes((flat, not how.enters), (weight, of_matrix or not how.enters))
        ctx.how, ctx.postpone = how, postpone
        is_trained = postpone is not None or weight.requires_grad
        known = (x_max, weight_max) if of_matrix else ()
        ctx.save_for_backward(x if is_trained else None, weight, *known)
        out = how.product((flat, x_max), (weight, weight_max))
        # As in torch's own linear: an all-reduce may overwrite the result, which autograd forbids for a view.
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
