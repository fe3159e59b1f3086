"""Layers computed for one chunk of the sequence at a time, in the forward and the backward pass, to save memory.

Only the inputs are saved for backward. The backward pass recomputes each chunk, so intermediate tensors exist for one
chunk at a time. Gradients of parameters are summed over the chunks in float32.

Shapes: S sequence, B batch, D hidden size; S/tp under sequence parallelism, else S.

Source: Liu and Abbeel 2023 (arXiv:2305.19370) for feed-forwards in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nxtrain.parallel.regions import TensorParallel

Product: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Function of activations at some positions of the sequence; it communicates nothing and treats all positions alike."""


def in_chunks(
    function: Product,
    x: Tensor,
    entered: Sequence[Tensor],
    params: Sequence[Tensor],
    tp: TensorParallel,
    num_chunks: int,
) -> tuple[Tensor, ...]:
    """Apply a position-wise function to a sequence, one chunk of the sequence at a time.

    Args:
        function: Function of a chunk of `x` and the same chunk of each tensor of `entered`.
        x: (S/tp, B, D) activation that each rank needs whole; gathered once in forward and once in backward.
        entered: Other activations of the whole sequence, (S, B, ...) each.
        params: Parameters that the function may use.
        tp: Tensor parallel context.
        num_chunks: Number of chunks.

    Returns:
        Results of the function for the whole sequence, (S, B, ...) each.
    """
    trained = [param for param in params if param.requires_grad]
    inputs = _Saved.apply(1 + len(entered), x, *entered, *trained)
    out: tuple[Tensor, ...] = _InChunks.apply(function, tp, num_chunks, len(inputs), *inputs, *trained)
    return out


class _Saved(torch.autograd.Function):
    """Autograd node that saves the inputs of `_InChunks` and returns them unchanged.

    With activation checkpointing, recomputation of a block stops after the last tensor that the block saves. A separate
    node lets it stop before the chunks are computed.
    """

    @staticmethod
    def forward(ctx: Any, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.num_params = len(tensors) - num_inputs
        inputs = tensors[:num_inputs]
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads, *[None] * ctx.num_params


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Product, tp: TensorParallel, num_chunks: int, num_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        x, *entered = tensors[:num_inputs]
        ctx.saved, ctx.params = x.grad_fn, tensors[num_inputs:]
        ctx.function = function
        ctx.tp = tp
        ctx.num_chunks = num_chunks
        results: list[tuple[Tensor, ...]] = []
        for parts in _parts((tp.whole(x), *entered), num_chunks):
            if results:
                tp.kernels.order([*parts, *results[-1]])
            results.append(function(*parts))
        return tuple(torch.cat(chunks) for chunks in zip(*results, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *entered = ctx.saved.saved_tensors
        tp, params = ctx.tp, ctx.params
        sums = _sums(params)
        input_grads: list[Sequence[Tensor]] = []
        grad_parts = _parts(grads, ctx.num_chunks)
        for parts, part_grads in zip(_parts((tp.whole(x), *entered), ctx.num_chunks), grad_parts, strict=True):
            # Without this order, a graph compiler would keep the results of the forward pass in memory and reuse them.
            tp.kernels.order([*parts, *part_grads, *sums])
            inputs = [part.requires_grad_() for part in parts]
            with torch.enable_grad():
                results = ctx.function(*inputs)
            all_grads = torch.autograd.grad(results, [*inputs, *params], part_grads, allow_unused=True)
            input_grads.append(all_grads[: len(inputs)])
            for total, grad in zip(sums, all_grads[len(inputs) :], strict=True):
                if grad is not None:
                    total.add_(grad)
            del results, all_grads  # otherwise they stay in memory while the next chunk is computed
        of_inputs = [torch.cat(chunks) for chunks in zip(*input_grads, strict=True)]
        if tp.axis.size > 1:
            reduce = tp.comm.reduce_scatter if tp.sequence_parallel else tp.comm.all_reduce
            of_inputs[0] = reduce(of_inputs[0], tp.axis)
        of_params = [total.to(param.dtype) for total, param in zip(sums, params, strict=True)]
        return None, None, None, None, *of_inputs, *of_params


def _sums(params: Sequence[Tensor]) -> list[Tensor]:
    """Allocate float32 zeros, shaped like the parameters, to which the gradients of all chunks are added."""
    return [torch.zeros(param.shape, dtype=torch.float32, device=param.device) for param in params]


def _parts(tensors: Sequence[Tensor], num_chunks: int) -> list[tuple[Tensor, ...]]:
    """Split tensors along dimension 0 into detached views, one tuple of views for each chunk."""
    rows = -(-tensors[0].shape[0] // num_chunks)
    return list(zip(*(x.detach().split(rows) for x in tensors), strict=True))
