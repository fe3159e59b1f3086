"""Linear layers sharded over the tensor parallel ranks.

A column layer shards the rows of its weight (outputs), a row layer shards the columns (inputs). A column layer followed
by a row layer needs one communication before and one after.

Shapes: S sequence, B batch, I inputs, O outputs; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.parallel.regions import TensorParallel

Product: TypeAlias = Callable[[], Tensor]
"""Function that computes the gradient of a weight."""

Postpone: TypeAlias = Callable[[Product], None]
"""Function that stores a weight gradient's computation, which the backward pass has postponed."""


class _ColumnProduct(torch.autograd.Function):
    """Autograd function of x @ weight.T for an input that every tp rank needs whole.

    Only this rank's slice of the input is saved. Backward gathers the input again while it computes the input's
    gradient. It sums the input's gradient over the ranks while it computes the weight's gradient. With a frozen weight
    no input is saved.

    In compiled blocks the whole input is saved. torch's compiler merges both gathers in any case, and torch 2.15 then
    leaves a gather without a use in backward, and joins the gather in forward with no product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.saves_whole = torch.compiler.is_compiling()
        whole = tp.whole(x)
        saved = whole if ctx.saves_whole else x
        ctx.save_for_backward(saved if weight.requires_grad else None, weight)
        return tp.kernels.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        if not tp.sequence_parallel:
            reducing = tp.comm.start_all_reduce(tp.kernels.matmul(grad, weight), tp.axis)
            weight_grad = None if x is None else _outer(grad, x, tp)
            return reducing.wait(), weight_grad, None
        if x is None:
            return tp.comm.reduce_scatter(tp.kernels.matmul(grad, weight), tp.axis), None, None
        gathering = None if ctx.saves_whole else tp.comm.start_all_gather(x.contiguous(), tp.axis)
        reducing = tp.comm.start_reduce_scatter(tp.kernels.matmul(grad, weight), tp.axis)
        weight_grad = _outer(grad, x if gathering is None else gathering.wait(), tp)
        return reducing.wait(), weight_grad, None


class _SplitProduct(torch.autograd.Function):
    """Autograd function of x @ weight.T whose backward computes the input gradient and postpones the weight gradient.

    The argument `weight` must be detached from its parameter. Otherwise autograd would take the parameter's gradient
    for complete when backward returns. If every rank needs the input whole, only this rank's slice is saved until the
    weight gradient is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, enters: bool, postpone: Postpone) -> Tensor:
        ctx.tp = tp
        ctx.enters = enters
        ctx.postpone = postpone
        ctx.save_for_backward(x, weight)
        if enters:
            x = tp.whole(x)
        return tp.kernels.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        ctx.postpone(partial(_weight_grad, grad, x, tp, ctx.enters))
        x_grad = tp.kernels.matmul(grad, weight)
        if ctx.enters:
            reduce = tp.comm.reduce_scatter if tp.sequence_parallel else tp.comm.all_reduce
            x_grad = reduce(x_grad, tp.axis)
        return x_grad, None, None, None, None


class _Biased(torch.autograd.Function):
    """Autograd function of x + bias, whose backward sums the gradient as a matrix over its rows.

    Torch's own backward keeps the dimensions in its sum, and returns a view of the sum. On a lazy device whose graph
    ends after backward, the graph would return both tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.flatten(0, -2).sum(0)


def _weight_grad(grad: Tensor, x: Tensor, tp: TensorParallel, enters: bool) -> Tensor:
    if enters:
        x = tp.whole(x)
    return _outer(grad, x, tp)


def _outer(grad: Tensor, x: Tensor, tp: TensorParallel) -> Tensor:
    """Gradient of a weight from output gradient and input: (..., O), (..., I) to (O, I)."""
    return tp.kernels.matmul(grad.flatten(0, -2).t(), x.flatten(0, -2))


class SplitBackward(nn.Module):
    """Linear layer whose weight gradient may be computed later than the gradient of its input.

    Attributes:
        weight: Parameter of the layer.
        postpone: Stores the computation of the weight gradient; None if the backward pass computes it.
        float8: Float8 product of the input, before any gather, with the weight; None for no float8.
        restored: Product of an already gathered input with a frozen weight in another form; None if `weight` is the
            weight.
        tp: Tensor parallel context of the layer.
        is_uniform: The layer computes the same function at every position.
    """

    weight: nn.Parameter
    tp: TensorParallel
    is_uniform: bool = True
    postpone: Postpone | None = None
    float8: Callable[[Tensor, Tensor, Postpone | None], Tensor] | None = None
    restored: Callable[[Tensor, Tensor], Tensor] | None = None


class ColumnLinear(SplitBackward):
    """Linear layer whose outputs are sharded over tp; several segments are fused in one weight.

    Args:
        in_features: I.
        segments: Stacked output matrices; each is sharded separately, so that a rank holds a slice of every matrix.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
        bias: The layer has a bias, sharded like the rows of the weight; the bias gradient is never postponed.
    """

    def __init__(
        self, in_features: int, segments: tuple[Segment, ...], init: Init, tp: TensorParallel, *, bias: bool = False
    ) -> None:
        super().__init__()
        spec = ShardSpec.column(in_features, segments, init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self.bias: nn.Parameter | None = None
        if bias:
            self.specs["bias"] = spec.of_bias()
            self.bias = tp.empty(spec.of_bias())
        self.split_sizes = tuple(piece.local_length for piece in spec.pieces(tp.axis))
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (S/tp, B, I) to (S, B, O/tp), with the segments side by side, `split_sizes` wide."""
        tp = self.tp
        out: Tensor
        if self.float8 is not None:
            out = self.float8(x, self.weight, self.postpone)
        elif self.postpone is not None:
            out = _SplitProduct.apply(x, self.weight.detach(), tp, True, self.postpone)
        elif self.restored is not None:
            out = self.restored(tp.enter(x), self.weight)
        elif tp.axis.size == 1:
            out = tp.kernels.linear(x, self.weight)
        else:
            out = _ColumnProduct.apply(x, self.weight, tp)
        if self.bias is not None:
            out = _Biased.apply(out, self.bias)
        return out

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """Activations that `product` takes in addition to the input, (S, B, ...) each; empty for this layer."""
        return ()

    def product(self, x: Tensor, *entered: Tensor) -> Tensor:
        """Part of `forward` without communication, for any T positions: (T, B, I) to (T, B, O/tp)."""
        out = _local_product(self, x)
        if self.bias is not None:
            out = _Biased.apply(out, self.bias)
        return out


class RowLinear(SplitBackward):
    """Linear layer whose inputs are sharded over tp.

    Args:
        in_features: I.
        out_features: O.
        init: Initial values of the weight.
        tp: Tensor parallel context of the layer.
        bias: The layer has a bias, which every rank holds whole.
    """

    def __init__(
        self, in_features: int, out_features: int, init: Init, tp: TensorParallel, *, bias: bool = False
    ) -> None:
        super().__init__()
        spec = ShardSpec.row(in_features, out_features, init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self.bias: nn.Parameter | None = None
        if bias:
            zeros = Init("zeros")
            partial = tp.sequence_parallel
            self.specs["bias"] = ShardSpec((out_features,), partial_gradient=partial, decay=False, init=zeros)
            self.bias = tp.empty(self.specs["bias"])
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (S, B, I/tp) to (S/tp, B, O)."""
        tp = self.tp
        out: Tensor
        if self.float8 is not None:
            out = self.float8(x, self.weight, self.postpone)
        elif self.postpone is not None:
            out = _SplitProduct.apply(x, self.weight.detach(), tp, False, self.postpone)
        elif self.restored is not None:
            out = self.restored(x, self.weight)
        else:
            out = tp.kernels.linear(x, self.weight)
        return self.exit(out)

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Part of `forward` without communication, for any T positions: (T, B, I/tp) to the arguments of `exit`."""
        return (_local_product(self, x),)

    def exit(self, out: Tensor, *others: Tensor) -> Tensor:
        """Sum the partial outputs of all tp ranks and add the bias: (S, B, O), overwritten, to (S/tp, B, O)."""
        out = self.tp.exit(out)
        if self.bias is not None:
            out = _Biased.apply(out, self.bias)
        return out


def _local_product(layer: SplitBackward, x: Tensor) -> Tensor:
    if layer.restored is not None:
        return layer.restored(x, layer.weight)
    return layer.tp.kernels.linear(x, layer.weight)
