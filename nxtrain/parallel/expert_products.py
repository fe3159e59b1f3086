"""Matrix products of mixture-of-experts feed-forwards, with few tensors saved for the backward pass.

The router's weight of a row multiplies the input of the last product, not its output. The product is linear, so both
give the same result. Thus the gradient of the weight does not need the expert's output. For each row, only its input
and its projection to gate and values are saved.

Shapes: N rows, D hidden size, F intermediate size of this rank, E experts, n blocks of B rows each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.common.kernels import Kernels, RowGroups


@dataclass(frozen=True)
class LowRank:
    """Low-rank update (LoRA) of one matrix of each expert: factor * B A.

    Args:
        a: (E, r, inputs).
        b: (E, outputs, r).
        factor: Factor of the product.
    """

    a: Tensor
    b: Tensor
    factor: float


@dataclass(frozen=True)
class ClampedUnit:
    """Gated unit (up + 1) * gate * sigmoid(alpha * gate), with the gate clamped from above and `up` from both sides.

    Args:
        limit: Largest gate, and largest absolute value of `up`.
        alpha: Factor inside of the sigmoid.

    Source: OpenAI 2025 (arXiv:2508.10925) section 2.2.
    """

    limit: float
    alpha: float

    def __call__(self, gate: Tensor, values: Tensor) -> Tensor:
        """Apply the unit to both halves of a projection: (..., F) each, to (..., F)."""
        # No `clamp`, for which torch-xla computes in float64.
        limit = gate.new_full((), self.limit)
        gate = torch.where(gate > limit, limit, gate)
        values = torch.where(values > limit, limit, values)
        values = torch.where(values < -limit, -limit, values)
        unit: Tensor = (values + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return unit


@dataclass(frozen=True)
class ExpertMatrices:
    """Weight matrices of the experts of a rank.

    Args:
        gate_up: (E * 2F, D) projection to gate and values; the rows of an expert are adjacent.
        down: (D, E * F) output projection; the columns of an expert are adjacent.
        number: E.
        of_gate_up, of_down: Low-rank updates of the two matrices; None for none.
        biases: (E * 2F,) and (E * D,), added to the products of the two matrices; None for no biases.
        unit: Gated unit; None for silu(gate) * up.
    """

    gate_up: Tensor
    down: Tensor
    number: int
    of_gate_up: LowRank | None = None
    of_down: LowRank | None = None
    biases: tuple[Tensor, Tensor] | None = None
    unit: ClampedUnit | None = None

    @property
    def is_plain(self) -> bool:
        """True without low-rank updates, biases and a clamped unit: the case with a hand-written backward pass."""
        return self.of_gate_up is None and self.of_down is None and self.biases is None and self.unit is None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of an expert's matrices: inputs of both projections, and ranks of low-rank updates."""
        ranks = [update.a.shape[1] for update in (self.of_gate_up, self.of_down) if update is not None]
        return (self.gate_up.shape[1], self.down.shape[1] // self.number, *ranks)

    def of_groups(self, rows: Tensor, scale: Tensor, groups: RowGroups, kernels: Kernels) -> Tensor:
        """Gated feed-forwards of rows sorted by expert, times a factor of each row: (N, D), (N,) to (N, D)."""
        if self.is_plain:
            return ExpertProducts.apply(rows, scale, self.gate_up, self.down, groups, kernels)  # type: ignore[no-any-return]
        numbers = torch.arange(len(rows), device=rows.device)
        owner = torch.searchsorted(groups.ends, numbers.int(), right=True)
        return self._composed(rows, scale, partial(_of_groups, groups=groups, kernels=kernels), owner)

    def of_blocks(self, blocks: Tensor, scale: Tensor, owner: Tensor | None) -> Tensor:
        """Gated feed-forwards of blocks of rows, times a factor of each row: (n, B, D), (n, B) to (n, B, D).

        Args:
            blocks: (n, B, D), rows of one expert in each block.
            scale: (n, B), factor of each row.
            owner: (n,) int64, expert of each block; None if each expert has one block.
        """
        if self.is_plain:
            return BlockProducts.apply(blocks, scale, self.gate_up, self.down, self.number, owner)  # type: ignore[no-any-return]
        return self._composed(blocks, scale, partial(_of_owners, owner=owner), owner)

    def _composed(
        self, rows: Tensor, scale: Tensor, product: Callable[[Tensor, Tensor], Tensor], owner: Tensor | None
    ) -> Tensor:
        """Gated feed-forwards made of operations that autograd differentiates, for biases, adapters and clamped units.

        Args:
            rows, scale: (N, D) and (N,), or (n, B, D) and (n, B).
            product: Product of rows with the transposed matrix of their expert.
            owner: (N,) or (n,), expert of each row or block; None if each expert has one block.
        """
        first, last = _of_blocks(self.gate_up, self.down, self.number)
        factor = scale.unsqueeze(-1).to(rows.dtype)
        projected = _with_update(rows, first, self.of_gate_up, product)
        if self.biases is not None:
            projected = projected + _of_owner(self.biases[0], self.number, owner, rows.dim())
        gate, values = projected.chunk(2, dim=-1)
        if self.unit is None:
            hidden = F.silu(gate) * values
        else:
            hidden = self.unit(gate, values)
        out = _with_update(hidden * factor, last, self.of_down, product)
        if self.biases is not None:
            out = out + _of_owner(self.biases[1], self.number, owner, rows.dim()) * factor
        return out


def _of_owner(bias: Tensor, number: int, owner: Tensor | None, num_dims: int) -> Tensor:
    """Bias of the expert of each row or block: (E * M,) to (N, M) or (n, 1, M).

    The bias is selected by a product with a matrix of ones and zeros. Its gradient is then a matrix product too, which
    sums in a fixed order.
    """
    by_expert: Tensor = bias.unflatten(0, (number, -1))
    if owner is not None:
        numbers = torch.arange(number, device=owner.device)
        by_expert = (owner.unsqueeze(1) == numbers).to(bias.dtype) @ by_expert
    if num_dims > by_expert.dim():
        return by_expert.unsqueeze(1)
    return by_expert


def _with_update(
    rows: Tensor, matrices: Tensor, update: LowRank | None, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    out = product(rows, matrices)
    if update is None:
        return out
    return out + product(product(rows, update.a) * update.factor, update.b)


def _of_groups(rows: Tensor, matrices: Tensor, groups: RowGroups, kernels: Kernels) -> Tensor:
    return GroupedProduct.apply(rows, matrices, groups, kernels)  # type: ignore[no-any-return]


def _of_owners(blocks: Tensor, matrices: Tensor, owner: Tensor | None) -> Tensor:
    own = matrices if owner is None else matrices.index_select(0, owner)
    return torch.bmm(blocks, own.transpose(1, 2))


class GroupedProduct(torch.autograd.Function):
    """Product of each expert's rows with the expert's transposed matrix: (N, I), (E, O, I) to (N, O)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, groups: RowGroups, kernels: Kernels) -> Tensor:
        ctx.groups, ctx.kernels = groups, kernels
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, matrices)
        return kernels.grouped_matmul(rows, matrices.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, matrices = ctx.saved_tensors
        grad = grad.contiguous()
        rows_grad, matrices_grad = None, None
        if ctx.needs_input_grad[0]:
            rows_grad = ctx.kernels.grouped_matmul(grad, matrices, ctx.groups)
        if ctx.needs_input_grad[1]:
            matrices_grad = torch.empty_like(matrices)
            ctx.kernels.grouped_gradient(grad, rows, ctx.groups, matrices_grad)
        return rows_grad, matrices_grad, None, None


class ExpertProducts(torch.autograd.Function):
    """Gated feed-forwards of the experts on rows sorted by expert, times a factor of each row: (N, D) to (N, D)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor, groups: RowGroups, kernels: Kernels
    ) -> Tensor:
        first, last = _of_blocks(gate_up, down, len(groups.ends))
        projected = kernels.grouped_matmul(rows, first.transpose(1, 2), groups)
        gate, values = projected.chunk(2, dim=-1)
        # Contiguous, since torch's CPU vectorization stops at the end of each row of a view.
        hidden = F.silu(gate.contiguous()).mul_(values).mul_(scale.unsqueeze(1).to(rows.dtype))
        ctx.groups, ctx.kernels = groups, kernels
        ctx.save_for_backward(rows, scale, projected, gate_up, down)
        return kernels.grouped_matmul(hidden, last.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale, projected, gate_up, down = ctx.saved_tensors
        groups, kernels = ctx.groups, ctx.kernels
        first, last = _of_blocks(gate_up, down, len(groups.ends))
        grad = grad.contiguous()
        gate, values = (half.contiguous() for half in projected.chunk(2, dim=-1))
        factor = scale.unsqueeze(1).to(rows.dtype)
        unit = F.silu(gate)
        hidden = unit * values
        hidden_grad = kernels.grouped_matmul(grad, last, groups)
        scale_grad = (hidden_grad.float() * hidden).sum(-1)
        gate_up_grad, down_grad = None, None
        if ctx.needs_input_grad[3]:
            down_grad = torch.empty_like(down)
            by_expert = down_grad.unflatten(1, (len(last), -1)).transpose(0, 1)
            kernels.grouped_gradient(grad, hidden.mul_(factor), groups, by_expert)
        hidden_grad.mul_(factor)
        gate_grad = torch.ops.aten.silu_backward(hidden_grad * values, gate)
        projected_grad = torch.cat([gate_grad, unit.mul_(hidden_grad)], dim=-1)
        if ctx.needs_input_grad[2]:
            gate_up_grad = torch.empty_like(gate_up)
            kernels.grouped_gradient(projected_grad, rows, groups, gate_up_grad.unflatten(0, (len(first), -1)))
        rows_grad = kernels.grouped_matmul(projected_grad, first, groups)
        return rows_grad, scale_grad, gate_up_grad, down_grad, None, None


class BlockProducts(torch.autograd.Function):
    """Gated feed-forwards on blocks of rows of one expert each, times a factor of each row: (n, B, D) to (n, B, D).

    The matrices of the block's expert are copied for each block, unless each expert has one block.
    """

    @staticmethod
    def forward(  # 7 arguments: as `ExpertProducts`, with blocks in place of groups
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


def _of_blocks(gate_up: Tensor, down: Tensor, num_experts: int, owner: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Matrices of the expert of each block, (n, 2F, D) and (n, D, F); `owner` is None if each expert has one block."""
    first = gate_up.unflatten(0, (num_experts, -1))
    last = down.unflatten(1, (num_experts, -1)).transpose(0, 1)
    if owner is None:
        return first, last
    return first.index_select(0, owner), last.index_select(0, owner)


def _by_expert(by_block: Tensor, num_experts: int, owner: Tensor | None) -> Tensor:
    """Sum gradients over the blocks of each expert: (n, ...) to (E, ...)."""
    if owner is None:
        return by_block
    numbers = torch.arange(num_experts, device=owner.device).unsqueeze(1)
    owned = (owner == numbers).to(by_block.dtype)
    sums = owned @ by_block.flatten(1)
    return sums.view(num_experts, *by_block.shape[1:])
