"""Dispatch of tokens to experts: rows by expert, and sums over the experts of a token.

A slot is one of the k experts of a token. Slots are numbered token by token. Each slot that is computed has a row, and
the rows of an expert are adjacent. A sum over the experts of a token has the order of its slots, whatever the order of
the rows. So no result depends on the ranks that hold an expert.

Eager devices compute as many rows as there are slots, and the host reads the numbers of rows. A device that records
graphs computes blocks of equal numbers of rows, some of them empty, so that its graph depends on no routing.

Shapes: T tokens, k experts of a token, N rows, D hidden, F intermediate of this rank, E experts.

Source: Gale et al. 2022 (arXiv:2211.15841); `blockwise.py` of NeuronX Distributed 0.18 for the number of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.kernels import Kernels
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.expert_products import BlockProducts, ExpertProducts


def capacity_of(num_slots: int, num_experts: int, factor: float) -> int:
    """Most slots that an expert computes, of `num_slots` that the experts share.

    Source: Fedus et al. 2021 (arXiv:2101.03961) equation 3.
    """
    return math.ceil(num_slots * factor / num_experts)


def num_dropped(indices: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Number of slots beyond the capacities of their experts, () float32."""
    numbers = torch.arange(num_experts, device=indices.device)
    counts = (indices.flatten().unsqueeze(1) == numbers).sum(0, dtype=torch.float32)
    return (counts - capacity).clamp(min=0).sum()


@dataclass(frozen=True)
class SlotRows:
    """Rows of the slots that are computed.

    Args:
        slots: (N,) int64, slot of each row; T * k for a row without slot.
        of_slots: (T * k,) int64, row of each slot; N for a slot that is not computed.
        k: Slots of a token.
        is_full: Every row has a slot, and every slot a row.
    """

    slots: Tensor
    of_slots: Tensor
    k: int
    is_full: bool

    def spread(self, x: Tensor) -> Tensor:
        """Rows of the tokens: (T, D) to (N, D)."""
        rows: Tensor = _Spread.apply(x, self.slots, self.of_slots, self.k, self.is_full)
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """Sums over the rows of each token: (N, D) to (T, D)."""
        sums: Tensor = _Collect.apply(rows, self.slots, self.of_slots, self.k, self.is_full)
        return sums

    def weights(self, weights: Tensor) -> Tensor:
        """Weight of each row, 0 for a row without slot: (T, k) to (N,)."""
        of_slots = weights.flatten().unsqueeze(1)
        rows: Tensor = _Spread.apply(of_slots, self.slots, self.of_slots, 1, self.is_full)
        return rows.squeeze(1)


class _Spread(torch.autograd.Function):
    """A row for each slot of a token; the backward pass sums over the slots in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, of_slots: Tensor, k: int, is_full: bool) -> Tensor:
        ctx.save_for_backward(of_slots)
        ctx.k, ctx.is_full = k, is_full
        return _rows(x, slots, k, is_full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (of_slots,) = ctx.saved_tensors
        return _sums(grad, of_slots, ctx.k, ctx.is_full), None, None, None, None


class _Collect(torch.autograd.Function):
    """Sums over the slots of a token in their order; the transposed function of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, of_slots: Tensor, k: int, is_full: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.k, ctx.is_full = k, is_full
        return _sums(x, of_slots, k, is_full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slots,) = ctx.saved_tensors
        return _rows(grad, slots, ctx.k, ctx.is_full), None, None, None, None


def _rows(x: Tensor, slots: Tensor, k: int, is_full: bool) -> Tensor:
    return _padded(x, is_full).index_select(0, slots // k)


def _sums(rows: Tensor, of_slots: Tensor, k: int, is_full: bool) -> Tensor:
    slots = _padded(rows, is_full).index_select(0, of_slots)
    return slots if k == 1 else slots.unflatten(0, (-1, k)).sum(1)


def _padded(x: Tensor, is_full: bool) -> Tensor:
    """Rows with a row of zeros after the last one, unless no index names that row."""
    return x if is_full else torch.cat([x, x.new_zeros(1, x.shape[1])])


def sorted_rows(indices: Tensor, num_experts: int, capacity: int | None = None) -> tuple[SlotRows, Tensor]:
    """Rows in the order of the experts, and then of the slots.

    Args:
        indices: (T, k) integers, expert of each slot.
        capacity: Most slots of an expert, which leaves out those of the highest numbers; None: no limit.

    Returns:
        The rows, and the number of rows of each expert, (E,) int64.
    """
    experts = indices.flatten()
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    if capacity is not None:
        starts = counts.cumsum(0) - counts
        position = torch.arange(len(order), device=order.device) - starts[experts[order]]
        order, counts = order[position < capacity], counts.clamp(max=capacity)
    numbers = torch.arange(len(order), device=order.device)
    of_slots = torch.full_like(experts, len(order), dtype=torch.int64).scatter(0, order, numbers)
    return SlotRows(order, of_slots, indices.shape[1], is_full=capacity is None), counts


def block_rows(indices: Tensor, num_experts: int, capacity: int | None = None) -> tuple[SlotRows, Tensor | None, int]:
    """Rows in blocks of equal size, each of one expert, by operations whose shapes depend on no routing.

    Args:
        indices, capacity: As for `sorted_rows`. With a capacity each expert has one block.

    Returns:
        The rows, the expert of each block, (number of blocks,) int64, or None for one block each, and the number of
        blocks.
    """
    experts, num_slots = indices.flatten(), indices.numel()
    numbers = torch.arange(num_experts, device=indices.device)
    hits = (experts.unsqueeze(1) == numbers).to(torch.int32)
    place = (hits.cumsum(0, dtype=torch.int32) * hits).sum(1) - 1
    if capacity is None:
        # Of the most uneven routing, each expert but one has a block with one row.
        height = -(-num_slots // num_experts)
        used = min(num_experts, num_slots)
        num_blocks = used + (num_slots - used) // height
        lengths = (hits.sum(0) + (height - 1)) // height
        ends = lengths.cumsum(0)
        first = (hits * (ends - lengths)).sum(1)
        blocks = torch.arange(num_blocks, device=indices.device).unsqueeze(1)
        owner: Tensor | None = (blocks >= ends).sum(1).clamp(max=num_experts - 1)
        row = first * height + place
    else:
        height, num_blocks, owner = capacity, num_experts, None
        row = torch.where(place < height, experts * height + place, num_blocks * height)
    row = row.to(torch.int64)
    num_rows = num_blocks * height
    slots = torch.full((num_rows + 1,), num_slots, device=row.device, dtype=torch.int64)
    slots = slots.scatter(0, row, torch.arange(num_slots, device=row.device))[:-1]
    return SlotRows(slots, row, indices.shape[1], is_full=False), owner, num_blocks


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

    The host reads the number of rows of each expert, since it starts the products one by one.

    Args:
        x: (T, D).
        weights: (T, k) float32.
        indices: (T, k) integers, the experts of each token, each once.
        gate_up: (E * 2F, D), the rows of an expert adjacent; under expert parallelism, of this rank's experts.
        down: (D, E * F), the columns of an expert adjacent, likewise.
        num_experts: E, over all ranks.
        capacity: As for `sorted_rows`.
        expert_parallel: Ranks that divide the experts; None: this rank has all.

    Returns:
        (T, D); with a sharded intermediate size, a partial sum over the tensor parallel ranks.
    """
    rows, counts = sorted_rows(indices, num_experts, capacity)
    own, scale = rows.spread(x), rows.weights(weights)
    if expert_parallel is None:
        return rows.collect(ExpertProducts.apply(own, scale, gate_up, down, counts.tolist(), kernels))
    exchange = expert_parallel.exchange(counts)
    own, scale = exchange.send(own), exchange.send(scale)
    out: Tensor = ExpertProducts.apply(own, scale, gate_up, down, exchange.counts, kernels)
    return rows.collect(exchange.give_back(out))


def static_dispatch(  # 8 arguments: as `dispatch`
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_experts: int,
    capacity: int | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Tensor:
    """The same as `dispatch`, by operations whose shapes depend on no routing.

    Between ranks only blocks of equal size are exchanged. Without a capacity, a block has room for every token.
    """
    if expert_parallel is not None and capacity is None:
        capacity = indices.shape[0]
    rows, owner, num_blocks = block_rows(indices, num_experts, capacity)
    blocks = rows.spread(x).unflatten(0, (num_blocks, -1))
    scale = rows.weights(weights).unflatten(0, (num_blocks, -1))
    if expert_parallel is None:
        out: Tensor = BlockProducts.apply(blocks, scale, gate_up, down, num_experts, owner)
        return rows.collect(out.flatten(0, 1))
    num_own = len(expert_parallel.own(num_experts))
    blocks, scale = expert_parallel.send_blocks(blocks), expert_parallel.send_blocks(scale)
    out = BlockProducts.apply(blocks, scale, gate_up, down, num_own, None)
    return rows.collect(expert_parallel.give_back_blocks(out).flatten(0, 1))
