"""Matrix products cut over the tensor parallel ranks.

A column layer holds rows of its weight (outputs), a row layer holds columns (inputs); one after the other needs one
communication on the way in and one on the way out.

Shapes: S sequence, B batch, I inputs, O outputs; S/tp under sequence parallelism, else S.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.parallel.regions import TensorParallel
from nxtrain.sharding import Init, Segment, ShardSpec


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


def _product(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    out: Tensor = _Product.apply(x, weight) if tp.comm.lazy else F.linear(x, weight)
    return out


class ColumnLinear(nn.Module):
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
        if self._tp.axis.size == 1:
            return _product(x, self.weight, self._tp)
        out: Tensor = _ColumnProduct.apply(x, self.weight, self._tp)
        return out


class RowLinear(nn.Module):
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
        partial = _product(x, self.weight, self._tp)
        return self._tp.leave(partial)
