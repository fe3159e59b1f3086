"""Matrix products cut over the tensor parallel ranks.

A column layer holds rows of its weight (outputs), a row layer holds columns (inputs); one after the other needs one
communication on the way in and one on the way out.

Shapes: S sequence, B batch, I inputs, O outputs; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.parallel.regions import TensorParallel
from nxtrain.sharding import Init, Segment, ShardSpec

Product: TypeAlias = Callable[[], Tensor]
"""Computes the gradient of a weight."""

Postpone: TypeAlias = Callable[[Product], None]
"""Takes the product that a backward pass leaves out."""


class _ColumnProduct(torch.autograd.Function):
    """x @ weight.T from an input that every rank needs whole.

    Only this rank's slice of the input is kept: backward gathers it again, while it computes the input's gradient, and
    sums that gradient over the ranks while it computes the weight's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        whole = tp.comm.all_gather(x.contiguous(), tp.axis) if tp.sequence_parallel else x
        return F.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        if tp.sequence_parallel:
            gathering = tp.comm.start_all_gather(x.contiguous(), tp.axis)
            reducing = tp.comm.start_reduce_scatter(grad @ weight, tp.axis)
            whole = gathering.wait()
        else:
            reducing = tp.comm.start_all_reduce(grad @ weight, tp.axis)
            whole = x
        weight_grad = grad.flatten(0, -2).t() @ whole.flatten(0, -2)
        return reducing.wait(), weight_grad, None


class _Product(torch.autograd.Function):
    """x @ weight.T that keeps the weight as it is: the linear layer of torch keeps it transposed.

    That is a view on eager devices, but where a graph ends between forward and backward a copy for each micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _SplitProduct(torch.autograd.Function):
    """x @ weight.T whose backward computes the gradient of the input, and postpones that of the weight.

    Given to it is the weight without its parameter, which autograd would take for done when this returns. Of an input
    that every rank needs whole only this rank's slice is kept, until the weight has its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel | None, postpone: Postpone) -> Tensor:
        ctx.tp, ctx.postpone = tp, postpone
        ctx.save_for_backward(x, weight)
        return F.linear(_whole(x, tp), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        ctx.postpone(partial(_weight_grad, grad, x, tp))
        x_grad = grad @ weight
        if tp is not None:
            reduce = tp.comm.reduce_scatter if tp.sequence_parallel else tp.comm.all_reduce
            x_grad = reduce(x_grad, tp.axis)
        return x_grad, None, None, None


def _weight_grad(grad: Tensor, x: Tensor, tp: TensorParallel | None) -> Tensor:
    return grad.flatten(0, -2).t() @ _whole(x, tp).flatten(0, -2)


def _whole(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """What all of these ranks need; None: each needs what it has."""
    return tp.comm.all_gather(x.contiguous(), tp.axis) if tp is not None and tp.sequence_parallel else x


def _product(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    out: Tensor = _Product.apply(x, weight) if tp.comm.lazy else F.linear(x, weight)
    return out


class SplitBackward(nn.Module):
    """A layer with a weight whose gradient may be computed later than that of its input.

    Attributes:
        weight: Its parameter.
        postpone: Where the product that makes the gradient goes; None: it is computed in the backward pass.
    """

    weight: nn.Parameter
    postpone: Postpone | None = None


class ColumnLinear(SplitBackward):
    """Linear layer whose outputs are cut over tp; fused when it has several segments.

    Args:
        in_features: I.
        segments: Output matrices stacked in one; each is cut on its own, so that a rank holds its part of every one.
        init: How the weight starts.
        tp: The ranks that share it.
    """

    def __init__(self, in_features: int, segments: tuple[Segment, ...], init: Init, tp: TensorParallel) -> None:
        super().__init__()
        spec = ShardSpec((sum(s.size for s in segments), in_features), dim=0, segments=segments, init=init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self.split_sizes = tuple(piece.local_length for piece in spec.pieces(tp.axis))
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """(S/tp, B, I) to (S, B, O/tp), the segments one after the other, `split_sizes` wide."""
        if self.postpone is not None:
            return _SplitProduct.apply(x, self.weight.detach(), self._tp, self.postpone)  # type: ignore[no-any-return]
        if self._tp.axis.size == 1:
            return _product(x, self.weight, self._tp)
        out: Tensor = _ColumnProduct.apply(x, self.weight, self._tp)
        return out


class RowLinear(SplitBackward):
    """Linear layer whose inputs are cut over tp.

    Args:
        in_features: I.
        out_features: O.
        init: How the weight starts.
        tp: The ranks that share it.
    """

    def __init__(self, in_features: int, out_features: int, init: Init, tp: TensorParallel) -> None:
        super().__init__()
        spec = ShardSpec((out_features, in_features), dim=1, init=init)
        self.specs = {"weight": spec}
        self.weight = tp.empty(spec)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, I/tp) to (S/tp, B, O)."""
        if self.postpone is not None:
            return self._tp.leave(_SplitProduct.apply(x, self.weight.detach(), None, self.postpone))
        return self._tp.leave(_product(x, self.weight, self._tp))
