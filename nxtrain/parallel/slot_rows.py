"""Arrangement of token rows by expert, and sums of expert outputs by token, for mixture-of-experts layers.

A slot is a (token, expert) pair: one of the k experts of a token. Slots are numbered token by token. Each slot that is
computed has a row, and the rows of an expert are adjacent. A sum over the experts of a token has the order of the
token's slots, whatever the order of the rows. So on eager devices no result depends on the ranks that hold an expert.

Shapes: T tokens, k experts of a token, N rows, D hidden size, E experts.

Source: Gale et al. 2022 (arXiv:2211.15841); `blockwise.py` of NeuronX Distributed 0.18 for the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.kernels import ANY_ROWS, Grouping

PAIR = 2
"""Number of experts per token for which one addition replaces a reduction: 9 times faster on a CPU in bfloat16."""


@dataclass(frozen=True)
class SlotRows:
    """Mapping between slots, the (token, expert) pairs, and the rows in which experts compute them.

    Args:
        slots: (N,) int64, slot of each row; T * k for a row without a slot.
        of_slots: (T * k,) int64, row of each slot; N for a slot that is not computed.
        k: Slots of a token.
        is_full: Every row has a slot.
        keeps_all: Every slot has a row.
    """

    slots: Tensor
    of_slots: Tensor
    k: int
    is_full: bool
    keeps_all: bool

    def spread(self, x: Tensor) -> Tensor:
        """Copy each token to the rows of its experts: (T, D) to (N, D)."""
        rows: Tensor = _Spread.apply(x, self.slots, self.of_slots, self.k, self.is_full, self.keeps_all)
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token: (N, D) to (T, D)."""
        sums: Tensor = _Collect.apply(rows, self.slots, self.of_slots, self.k, self.is_full, self.keeps_all)
        return sums

    def weights(self, weights: Tensor) -> Tensor:
        """Router weight of each row, 0 for a row without a slot: (T, k) to (N,)."""
        of_slots = weights.flatten().unsqueeze(1)
        rows: Tensor = _Spread.apply(of_slots, self.slots, self.of_slots, 1, self.is_full, self.keeps_all)
        return rows.squeeze(1)


class _Spread(torch.autograd.Function):
    """Autograd function that copies tokens to rows; backward sums the gradients of a token's slots in order."""

    @staticmethod
    def forward(  # 7 arguments: the fields of `SlotRows`, of which autograd watches the tensors
        ctx: Any, x: Tensor, slots: Tensor, of_slots: Tensor, k: int, is_full: bool, keeps_all: bool
    ) -> Tensor:
        ctx.save_for_backward(of_slots)
        ctx.k, ctx.keeps_all = k, keeps_all
        return _rows(x, slots, k, is_full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (of_slots,) = ctx.saved_tensors
        return _sums(grad, of_slots, ctx.k, ctx.keeps_all), None, None, None, None, None


class _Collect(torch.autograd.Function):
    """Autograd function that sums a token's rows in the order of its slots; the transpose of `_Spread`."""

    @staticmethod
    def forward(  # 7 arguments: as `_Spread`
        ctx: Any, x: Tensor, slots: Tensor, of_slots: Tensor, k: int, is_full: bool, keeps_all: bool
    ) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.k, ctx.is_full = k, is_full
        return _sums(x, of_slots, k, keeps_all)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _rows(grad, slots, ctx.k, ctx.is_full), None, None, None, None, None


def _rows(x: Tensor, slots: Tensor, k: int, is_full: bool) -> Tensor:
    return _padded(x, is_full).index_select(0, slots // k)


def _sums(rows: Tensor, of_slots: Tensor, k: int, keeps_all: bool) -> Tensor:
    slots = _padded(rows, keeps_all).index_select(0, of_slots)
    if k == 1:
        return slots
    by_token: Tensor = slots.unflatten(0, (-1, k))
    if k == PAIR:
        return by_token[:, 0] + by_token[:, 1]
    return by_token.sum(1)


def _padded(x: Tensor, is_covered: bool) -> Tensor:
    """Append a row of zeros, to which indices without a row point; unchanged if `is_covered`."""
    return x if is_covered else torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def sorted_rows(
    indices: Tensor, num_experts: int, capacity: int | None = None, grouping: Grouping = ANY_ROWS
) -> tuple[SlotRows, Tensor]:
    """Arrange slots, the (token, expert) pairs, in rows sorted by expert and then by token.

    Args:
        indices: (T, k) integers, expert of each slot.
        num_experts: E.
        capacity: Most slots of an expert; slots of the highest numbers are dropped. None for no limit.
        grouping: Requirement of the matrix products on the rows of an expert. The last rows of an expert may be without
            a slot.

    Returns:
        The rows, and the number of rows of each expert, (E,) int64.
    """
    experts = indices.flatten()
    num_slots = indices.numel()
    multiple = grouping.multiple
    order = experts.argsort(stable=True)
    by_expert = experts[order]
    # No `bincount`: the shape of its result depends on the data, so the host would wait.
    ends = torch.searchsorted(by_expert, torch.arange(num_experts, device=order.device), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts, num_rows = ends - starts, num_slots
    if capacity is not None:
        counts, num_rows = counts.clamp(max=capacity), min(num_rows, num_experts * capacity)
    heights = (counts + (multiple - 1)) // multiple * multiple
    if grouping.counted:
        if multiple > 1 or capacity is not None:
            num_rows = int(heights.sum())
    else:
        heights = heights.clamp(min=multiple)
        num_rows = -(-num_rows // multiple) * multiple + num_experts * multiple
        heights[-1] += num_rows - heights.sum()
    position = torch.arange(num_slots, device=order.device) - starts[by_expert]
    row = (heights.cumsum(0) - heights)[by_expert] + position
    if capacity is not None:
        row = torch.where(position < capacity, row, num_rows)
    slots = torch.full((num_rows + 1,), num_slots, device=order.device).scatter(0, row, order)[:-1]
    of_slots = torch.empty_like(order).scatter(0, order, row)
    is_full = grouping.counted and multiple == 1
    return SlotRows(slots, of_slots, indices.shape[1], is_full=is_full, keeps_all=capacity is None), heights


def block_rows(
    indices: Tensor,
    num_experts: int,
    capacity: int | None = None,
    most_slots: int | None = None,
    height: int | None = None,
) -> tuple[SlotRows, Tensor | None, int]:
    """Arrange slots, the (token, expert) pairs, in blocks of equal size, each of one expert.

    The shapes of all operations are independent of the routing.

    Args:
        indices, num_experts, capacity: As for `sorted_rows`. With a capacity each expert has one block.
        most_slots: Most slots of the numbered experts. Other slots have the expert number `num_experts`, and no row.
            None if every slot has one of the experts.
        height: Rows of a block without a capacity; None for the rows of an even load.

    Returns:
        The rows, the expert of each block, and the number of blocks. The experts are (number of blocks,) int64, or None
        if each expert has one block.
    """
    experts, num_slots = indices.flatten(), indices.numel()
    numbers = torch.arange(num_experts, device=indices.device)
    hits = (experts.unsqueeze(1) == numbers).to(torch.int32)
    position = (hits.cumsum(0, dtype=torch.int32) * hits).sum(1) - 1
    if capacity is None:
        # In the most uneven routing, each expert but one has a block with one row.
        most = num_slots if most_slots is None else most_slots
        if height is None:
            height = -(-most // num_experts)
        used = min(num_experts, most)
        num_blocks = used + (most - used) // height
        lengths = (hits.sum(0) + (height - 1)) // height
        ends = lengths.cumsum(0)
        first = (hits * (ends - lengths)).sum(1)
        blocks = torch.arange(num_blocks, device=indices.device).unsqueeze(1)
        owner: Tensor | None = (blocks >= ends).sum(1).clamp(max=num_experts - 1)
        row = first * height + position
    else:
        height = capacity
        num_blocks = num_experts
        owner = None
        row = torch.where(position < height, experts * height + position, num_blocks * height)
    if most_slots is not None:
        row = torch.where(experts < num_experts, row, num_blocks * height)
    row = row.to(torch.int64)
    num_rows = num_blocks * height
    slots = torch.full((num_rows + 1,), num_slots, device=row.device, dtype=torch.int64)
    slots = slots.scatter(0, row, torch.arange(num_slots, device=row.device))[:-1]
    keeps_all = capacity is None and most_slots is None
    rows = SlotRows(slots, row, indices.shape[1], is_full=False, keeps_all=keeps_all)
    return rows, owner, num_blocks
