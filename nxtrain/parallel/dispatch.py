"""Dispatch of tokens to experts: rows sorted by expert, products of each expert, and sums over the experts of a token.

A slot is one of the k experts of a token. Slots are numbered token by token. A sum over the experts of a token has
the order of its slots, whatever the order of the experts' work. So no result depends on the ranks that hold an expert.

Shapes: T tokens, k experts of a token, N slots that are computed, D hidden, F intermediate of this rank, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.kernels import Kernels
from nxtrain.parallel.expert_parallel import ExpertParallel


def capacity_of(num_slots: int, num_experts: int, factor: float) -> int:
    """Most slots that an expert computes, of `num_slots` that the experts share.

    Source: Fedus et al. 2021 (arXiv:2101.03961) equation 3.
    """
    return math.ceil(num_slots * factor / num_experts)


def sorted_slots(indices: Tensor, num_experts: int, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """Slots that are computed, in the order of their experts and then of their numbers.

    Args:
        indices: (T, k) integers, expert of each slot.
        capacity: Most slots of an expert, which drops those of the highest numbers; None: no limit.

    Returns:
        Slots (N,) and the number of slots of each expert (E,), both int64.
    """
    experts = indices.flatten()
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    if capacity is None:
        return order, counts
    starts = counts.cumsum(0) - counts
    position = torch.arange(len(order), device=order.device) - starts[experts[order]]
    return order[position < capacity], counts.clamp(max=capacity)


def dispatch(  # 9 arguments: tokens, their routing, the experts, the limit of an expert, and the ranks
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_experts: int,
    kernels: Kernels,
    capacity: int | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Tensor:
    """Weighted sum over the experts of each token.

    The host reads the number of slots of each expert, since it starts the products one by one.

    Args:
        x: (T, D).
        weights: (T, k) float32.
        indices: (T, k) integers, the experts of each token, each once.
        gate_up: (E * 2F, D), the rows of an expert adjacent; under expert parallelism, of this rank's experts.
        down: (D, E * F), the columns of an expert adjacent, likewise.
        num_experts: E, over all ranks.
        capacity: As for `sorted_slots`.
        expert_parallel: Ranks that divide the experts; None: this rank has all.

    Returns:
        (T, D); with a sharded intermediate size, a partial sum over the tensor parallel ranks.
    """
    k = indices.shape[1]
    slots, counts = sorted_slots(indices, num_experts, capacity)
    rows: Tensor = _Spread.apply(x, slots, k)
    scale = weights.flatten().index_select(0, slots)
    if expert_parallel is None:
        out: Tensor = ExpertProducts.apply(rows, scale, gate_up, down, counts.tolist(), kernels)
    else:
        exchange = expert_parallel.exchange(counts)
        rows, scale = exchange.send(rows), exchange.send(scale)
        out = exchange.give_back(ExpertProducts.apply(rows, scale, gate_up, down, exchange.counts, kernels))
    summed: Tensor = _Collect.apply(out, slots, x.shape[0], k)
    return summed


class _Spread(torch.autograd.Function):
    """Rows of the slots: (T, D) to (N, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_tokens, ctx.k = x.shape[0], k
        return x.index_select(0, slots // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _sum_of_slots(grad, slots, ctx.num_tokens, ctx.k), None, None


class _Collect(torch.autograd.Function):
    """Sums over the slots of each token: (N, D) to (T, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_tokens: int, k: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.k = k
        return _sum_of_slots(rows, slots, num_tokens, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots // ctx.k), None, None, None


def _sum_of_slots(rows: Tensor, slots: Tensor, num_tokens: int, k: int) -> Tensor:
    whole = rows.new_zeros(num_tokens * k, rows.shape[1])
    return whole.index_copy_(0, slots, rows).view(num_tokens, k, -1).sum(1)


class ExpertProducts(torch.autograd.Function):
    """Gated feed-forwards of the experts on sorted rows, times a factor of each row: (N, D) to (N, D).

    The factor multiplies the input of the last product, which is linear. So the output of an expert is not saved for
    the gradient of the factor. Of a row, only its input and its projection to gate and values are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int], kernels: Kernels
    ) -> Tensor:
        projected = rows.new_empty(rows.shape[0], gate_up.shape[0] // len(counts))
        out = torch.empty_like(rows)
        for own, first, last in _experts(counts, gate_up, down):
            projected[own] = kernels.matmul(rows[own], gate_up[first].t())
            gate, values = projected[own].chunk(2, dim=-1)
            hidden = F.silu(gate).mul_(values).mul_(scale[own].unsqueeze(1))
            out[own] = kernels.matmul(hidden, down[:, last].t())
        ctx.counts, ctx.kernels = counts, kernels
        ctx.save_for_backward(rows, scale, projected, gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, projected, gate_up, down = ctx.saved_tensors
        matmul = ctx.kernels.matmul
        rows_grad, scale_grad = torch.empty_like(rows), torch.empty_like(scale)
        # Zeros: an expert without rows has a gradient, too.
        gate_up_grad = torch.zeros_like(gate_up) if ctx.needs_input_grad[2] else None
        down_grad = torch.zeros_like(down) if ctx.needs_input_grad[3] else None
        for own, first, last in _experts(ctx.counts, gate_up, down):
            gate, values = projected[own].chunk(2, dim=-1)
            factor = scale[own].unsqueeze(1).to(rows.dtype)
            unit = F.silu(gate)
            hidden = unit * values
            hidden_grad = matmul(grad[own], down[:, last])
            scale_grad[own] = (hidden_grad.float() * hidden).sum(-1)
            if down_grad is not None:
                down_grad[:, last] = matmul(grad[own].t(), hidden.mul_(factor))
            hidden_grad = hidden_grad * factor
            gate_grad = torch.ops.aten.silu_backward(hidden_grad * values, gate)
            projected_grad = torch.cat([gate_grad, unit.mul_(hidden_grad)], dim=-1)
            rows_grad[own] = matmul(projected_grad, gate_up[first])
            if gate_up_grad is not None:
                gate_up_grad[first] = matmul(projected_grad.t(), rows[own])
        return rows_grad, scale_grad, gate_up_grad, down_grad, None, None


def _experts(counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, rows of the first matrix and columns of the second, for each expert that has rows."""
    height, width = gate_up.shape[0] // len(counts), down.shape[1] // len(counts)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            first, last = expert * height, expert * width
            yield slice(start, start + count), slice(first, first + height), slice(last, last + width)
        start += count
