"""Differentiable collectives of tensor parallelism: each forward communication is paired with one for its gradient.

Under tensor parallelism an activation is either whole on every rank, or, with sequence parallelism, sharded along
dimension 0 (the sequence). The functions of this module convert between the two forms.

Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3; Korthikanti et al. 2022 (arXiv:2205.05198) section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxtrain.common.distributed.collectives import Collectives, RowCounts
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives, axis: Axis) -> Tensor:
        ctx.comm, ctx.axis = comm, axis
        return comm.all_gather(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(grad.contiguous(), ctx.axis), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives, axis: Axis) -> Tensor:
        ctx.comm, ctx.axis = comm, axis
        return comm.reduce_scatter(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(grad.contiguous(), ctx.axis), None, None


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives, axis: Axis) -> Tensor:
        ctx.comm, ctx.axis = comm, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A copy, since the all-reduce works in place, and autograd may pass the same gradient to other functions.
        own = grad.clone(memory_format=torch.contiguous_format)
        return ctx.comm.all_reduce(own, ctx.axis), None, None


class _ReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return comm.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives, axis: Axis, rows: RowCounts | None) -> Tensor:
        ctx.comm = comm
        ctx.axis = axis
        ctx.back = None if rows is None else rows.back
        return comm.all_to_all(x.contiguous(), axis, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.comm.all_to_all(grad.contiguous(), ctx.axis, ctx.back), None, None, None


def all_to_all(x: Tensor, comm: Collectives, axis: Axis, rows: RowCounts | None = None) -> Tensor:
    """Exchange blocks of rows between all ranks of an axis; backward exchanges the gradients in reverse.

    Args:
        x, rows: As for `Collectives.all_to_all`.
        comm: Collectives.
        axis: Axis whose ranks exchange rows.
    """
    if axis.size == 1:
        return x
    return _AllToAll.apply(x, comm, axis, rows)  # type: ignore[no-any-return]


def sum_over(x: Tensor, comm: Collectives, axis: Axis) -> Tensor:
    """All-reduce that sums a tensor over the ranks of an axis; backward passes the sum's gradient to every rank.

    Args:
        x: Summand of this rank; overwritten.
        comm: Collectives.
        axis: Axis to sum over.
    """
    if axis.size == 1:
        return x
    return _ReduceSum.apply(x, comm, axis)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallel context that every sharded layer gets: axis, collectives, kernels and settings.

    Args:
        axis: Tensor parallel axis.
        comm: Collectives.
        kernels: Kernels of the device.
        dtype: Type of the weights.
        sequence_parallel: Between the layers, activations are sharded along the sequence.
    """

    axis: Axis
    comm: Collectives
    kernels: Kernels
    dtype: torch.dtype
    sequence_parallel: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Gather the input of a layer in which each rank computes its shard of the output from the whole input.

        Args:
            x: (S / tp, B, D) under sequence parallelism, else (S, B, D), equal on all ranks.

        Returns:
            (S, B, D), equal on all ranks. Its gradient may differ by rank and is summed over tp in backward.
        """
        if self.axis.size == 1:
            return x
        function = _GatherSequence if self.sequence_parallel else _ReduceGradient
        return function.apply(x, self.comm, self.axis)  # type: ignore[no-any-return]

    def whole(self, x: Tensor) -> Tensor:
        """All-gather an activation inside of an autograd function, without a backward pass of its own.

        Args:
            x: (S / tp, B, D) under sequence parallelism; otherwise returned unchanged.
        """
        if self.sequence_parallel:
            return self.comm.all_gather(x.contiguous(), self.axis)
        return x

    def exit(self, x: Tensor) -> Tensor:
        """Sum the partial outputs of a layer over all tensor parallel ranks.

        Args:
            x: (S, B, D), a partial sum; overwritten.

        Returns:
            (S / tp, B, D) under sequence parallelism, else (S, B, D), equal on all ranks.
        """
        if self.axis.size == 1:
            return x
        function = _ScatterSequence if self.sequence_parallel else _ReduceSum
        return function.apply(x, self.comm, self.axis)  # type: ignore[no-any-return]

    def empty(self, spec: ShardSpec) -> nn.Parameter:
        """Uninitialized parameter for this rank's shard of a weight."""
        return nn.Parameter(torch.empty(spec.local_shape(self.axis), dtype=self.dtype))
