"""Linear layers sharded over the tensor parallel ranks.

A column layer holds rows of its weight (outputs), a row layer holds columns (inputs). A column layer followed by a row
layer needs one communication before and one after.

Shapes: S sequence, B batch, I inputs, O outputs; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.parallel.products import linear, matmul
from nxtrain.parallel.regions import TensorParallel

Product: TypeAlias = Callable[[], Tensor]
"""Function that computes the gradient of a weight."""

Postpone: TypeAlias = Callable[[Product], None]
"""Function that stores a product postponed by a backward pass."""


class _ColumnProduct(torch.autograd.Function):
    """x @ weight.T from an input that every rank needs whole.

    Only this rank's slice of the input is saved. Backward gathers the input again while it computes the input's
    gradient, and sums that gradient over the ranks while it computes the weight's. A frozen weight needs no input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        whole = tp.comm.all_gather(x.contiguous(), tp.axis) if tp.sequence_parallel else x
        return linear(whole, weight, wide=tp.wide_products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        gathers = tp.sequence_parallel and x is not None
        gathering = tp.comm.start_all_gather(x.contiguous(), tp.axis) if gathers else None
        reduce = tp.comm.start_reduce_scatter if tp.sequence_parallel else tp.comm.start_all_reduce
        reducing = reduce(matmul(grad, weight, wide=tp.wide_products), tp.axis)
        if x is None:
            return reducing.wait(), None, None
        whole = gathering.wait() if gathering is not None else x
        weight_grad = _outer(grad, whole, wide=tp.wide_products)
        return reducing.wait(), weight_grad, None


class _Product(torch.autograd.Function):
    """x @ weight.T that saves its arguments as they are.

    Torch's linear function saves the transposed weight, which is a view on eager devices. On a lazy device whose graph
    ends between forward and backward, it would be a copy for each micro-batch. Autograd would also save the float32
    copies of wide products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        ctx.wide = wide
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return linear(x, weight, wide=wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_grad = matmul(grad, weight, wide=ctx.wide) if ctx.needs_input_grad[0] else None
        return x_grad, None if x is None else _outer(grad, x, wide=ctx.wide), None


class _SplitProduct(torch.autograd.Function):
    """x @ weight.T whose backward computes the gradient of the input, and postpones the gradient of the weight.

    The argument `weight` is detached from its parameter, whose gradient autograd would else take for complete when
    backward returns. Of an input that every rank needs whole, only this rank's slice is saved, until the weight has its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, enters: bool, postpone: Postpone) -> Tensor:
        ctx.tp, ctx.enters, ctx.postpone = tp, enters, postpone
        ctx.save_for_backward(x, weight)
        return linear(_whole(x, tp) if enters else x, weight, wide=tp.wide_products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        ctx.postpone(partial(_weight_grad, grad, x, tp, ctx.enters))
        x_grad = matmul(grad, weight, wide=tp.wide_products)
        if ctx.enters:
            reduce = tp.comm.reduce_scatter if tp.sequence_parallel else tp.comm.all_reduce
            x_grad = reduce(x_grad, tp.axis)
        return x_grad, None, None, None, None


class _Biased(torch.autograd.Function):
    """x + bias, whose backward sums a matrix.

    Torch's own sums keep the dimensions, and return a view of the sum. On a lazy device whose graph ends after
    backward, the graph would return both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.flatten(0, -2).sum(0)


def _weight_grad(grad: Tensor, x: Tensor, tp: TensorParallel, enters: bool) -> Tensor:
    return _outer(grad, _whole(x, tp) if enters else x, wide=tp.wide_products)


def _outer(grad: Tensor, x: Tensor, *, wide: bool) -> Tensor:
    """Gradient of a weight: (..., O), (..., I) to (O, I)."""
    return matmul(grad.flatten(0, -2).t(), x.flatten(0, -2), wide=wide)


def _whole(x: Tensor, tp: TensorParallel) -> Tensor:
    """Input gathered over the sequence under sequence parallelism; else the input itself."""
    return tp.comm.all_gather(x.contiguous(), tp.axis) if tp.sequence_parallel else x


def product(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """x @ weight.T, in the form that suits the device."""
    if not (tp.comm.lazy or tp.wide_products):
        return F.linear(x, weight)
    out: Tensor = _Product.apply(x, weight, tp.wide_products)
    return out


class SplitBackward(nn.Module):
    """A layer whose weight gradient may be computed later than the gradient of its input.

    Attributes:
        weight: Parameter of the layer.
        postpone: Stores the product that computes the gradient; None: the backward pass computes it.
        restored: Product with a frozen weight that is kept in another form, of an input that needs no gathering; None:
            `weight` is the weight.
    """

    weight: nn.Parameter
    postpone: Postpone | None = None
    restored: Callable[[Tensor], Tensor] | None = None


class ColumnLinear(SplitBackward):
    """Linear layer whose outputs are sharded over tp; fused when it has several segments.

    Args:
        in_features: I.
        segments: Stacked output matrices; each is sharded on its own, so that a rank holds a slice of every one.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
        bias: The layer has a bias, sharded like the rows of the weight; backward never postpones its gradient.
    """

    def __init__(
        self, in_features: int, segments: tuple[Segment, ...], init: Init, tp: TensorParallel, *, bias: bool = False
    ) -> None:
        super().__init__()
        spec = ShardSpec.column(in_features, segments, init)
        self.specs = {"weight": spec, "bias": spec.of_bias()} if bias else {"weight": spec}
        self.weight = tp.empty(spec)
        self.bias = tp.empty(spec.of_bias()) if bias else None
        self.split_sizes = tuple(piece.local_length for piece in spec.pieces(tp.axis))
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """(S/tp, B, I) to (S, B, O/tp), the segments one after the other, `split_sizes` wide."""
        out = self._product(x)
        return out if self.bias is None else _Biased.apply(out, self.bias)

    def _product(self, x: Tensor) -> Tensor:
        if self.postpone is not None:
            return _SplitProduct.apply(x, self.weight.detach(), self._tp, True, self.postpone)  # type: ignore[no-any-return]
        if self.restored is not None:
            return self.restored(self._tp.enter(x))
        if self._tp.axis.size == 1:
            return product(x, self.weight, self._tp)
        out: Tensor = _ColumnProduct.apply(x, self.weight, self._tp)
        return out


class RowLinear(SplitBackward):
    """Linear layer whose inputs are sharded over tp.

    Args:
        in_features: I.
        out_features: O.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
    """

    def __init__(self, in_features: int, out_features: int, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        spec = ShardSpec.row(in_features, out_features, init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, I/tp) to (S/tp, B, O)."""
        if self.postpone is not None:
            return self._tp.exit(_SplitProduct.apply(x, self.weight.detach(), self._tp, False, self.postpone))
        if self.restored is not None:
            return self._tp.exit(self.restored(x))
        return self._tp.exit(product(x, self.weight, self._tp))
