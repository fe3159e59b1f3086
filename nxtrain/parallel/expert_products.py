"""Products of experts: gated feed-forwards of the rows of each expert, with little saved for the backward pass.

The factor of a row multiplies the input of the last product, which is linear. So the output of an expert is not saved
for the gradient of the factor. Of a row, only its input and its projection to gate and values are saved.

Shapes: N rows, D hidden, F intermediate of this rank, E experts, n blocks of B rows each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.kernels import Kernels


class ExpertProducts(torch.autograd.Function):
    """Gated feed-forwards of the experts on sorted rows, times a factor of each row: (N, D) to (N, D)."""

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


class BlockProducts(torch.autograd.Function):
    """Gated feed-forwards on blocks of rows of one expert each, times a factor of each row: (n, B, D) to (n, B, D).

    The matrices of a block's expert are copied for the block, unless each expert has one block.
    """

    @staticmethod
    def forward(  # 7 arguments: as `ExpertProducts`, with blocks in place of counts
        ctx: Any,
        blocks: Tensor,
        scale: Tensor,
        gate_up: Tensor,
        down: Tensor,
        num_experts: int,
        owner: Tensor | None,
    ) -> Tensor:
        first, last = _of_blocks(gate_up, down, num_experts, owner)
        projected = torch.bmm(blocks, first.transpose(1, 2))
        gate, values = projected.chunk(2, dim=-1)
        hidden = F.silu(gate) * values * scale.unsqueeze(2).to(blocks.dtype)
        ctx.num_experts = num_experts
        ctx.save_for_backward(blocks, scale, projected, gate_up, down, owner)
        return torch.bmm(hidden, last.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        blocks, scale, projected, gate_up, down, owner = ctx.saved_tensors
        first, last = _of_blocks(gate_up, down, ctx.num_experts, owner)
        gate, values = projected.chunk(2, dim=-1)
        factor = scale.unsqueeze(2).to(blocks.dtype)
        unit = F.silu(gate)
        hidden = unit * values
        hidden_grad = torch.bmm(grad, last)
        scale_grad = (hidden_grad.float() * hidden).sum(-1)
        hidden_grad = hidden_grad * factor
        gate_grad = torch.ops.aten.silu_backward(hidden_grad * values, gate)
        projected_grad = torch.cat([gate_grad, unit * hidden_grad], dim=-1)
        gate_up_grad, down_grad = None, None
        if ctx.needs_input_grad[2]:
            by_block = torch.bmm(projected_grad.transpose(1, 2), blocks)
            gate_up_grad = _by_expert(by_block, ctx.num_experts, owner).flatten(0, 1)
        if ctx.needs_input_grad[3]:
            by_block = torch.bmm(grad.transpose(1, 2), hidden * factor)
            down_grad = _by_expert(by_block, ctx.num_experts, owner).transpose(0, 1).flatten(1)
        return torch.bmm(projected_grad, first), scale_grad, gate_up_grad, down_grad, None, None


def _of_blocks(gate_up: Tensor, down: Tensor, num_experts: int, owner: Tensor | None) -> tuple[Tensor, Tensor]:
    """Matrices of each block: (n, 2F, D) and (n, D, F)."""
    first = gate_up.unflatten(0, (num_experts, -1))
    last = down.unflatten(1, (num_experts, -1)).transpose(0, 1)
    if owner is None:
        return first, last
    return first.index_select(0, owner), last.index_select(0, owner)


def _by_expert(by_block: Tensor, num_experts: int, owner: Tensor | None) -> Tensor:
    """Sums over the blocks of each expert: (n, ...) to (E, ...)."""
    if owner is None:
        return by_block
    numbers = torch.arange(num_experts, device=owner.device).unsqueeze(1)
    owned = (owner == numbers).to(by_block.dtype)
    sums = owned @ by_block.flatten(1)
    return sums.view(num_experts, *by_block.shape[1:])
