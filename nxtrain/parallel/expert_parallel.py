"""Expert parallelism: each rank of an axis computes some experts, for the tokens of all ranks of the axis.

First the ranks exchange the numbers of their rows for each expert, then the rows. Outputs go the same way back. So a
rank that no token wants still takes part, and an expert sees its rows in the order of the ranks.

Shapes: E experts of all ranks; N rows of this rank, sorted by expert; M rows of this rank's experts, sorted by expert,
then by rank.

Source: Lepikhin et al. 2020 (arXiv:2006.16668) section 3; Gale et al. 2022 (arXiv:2211.15841) section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives, RowCounts
from nxtrain.common.mesh import Axis
from nxtrain.parallel.regions import all_to_all


class _Reorder(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@dataclass(frozen=True)
class RowExchange:
    """Exchange of rows whose numbers all ranks know.

    Args:
        comm, axis: Collectives and the expert parallel axis.
        counts: Rows of each expert of this rank, M in all.
        rows: Rows that this rank sends to each rank, and receives.
        order: (M,) int64, received rows in the order of the experts.
        inverse: (M,) int64, rows of the experts in the order in which they were received.
    """

    comm: Collectives
    axis: Axis
    counts: Sequence[int]
    rows: RowCounts
    order: Tensor
    inverse: Tensor

    def send(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts, from all ranks: (N, ...) to (M, ...)."""
        received = all_to_all(rows, self.comm, self.axis, self.rows)
        return _Reorder.apply(received, self.order, self.inverse)  # type: ignore[no-any-return]

    def give_back(self, rows: Tensor) -> Tensor:
        """Rows of this rank, from all experts: (M, ...) to (N, ...)."""
        return all_to_all(_Reorder.apply(rows, self.inverse, self.order), self.comm, self.axis, self.rows.back)


@dataclass(frozen=True)
class ExpertParallel:
    """Ranks that divide the experts of every block.

    Args:
        axis: Expert parallel axis; each rank has adjacent experts, and as many as the others.
        comm: Collectives.
    """

    axis: Axis
    comm: Collectives

    def own(self, num_experts: int) -> range:
        """Experts of this rank."""
        share = num_experts // self.axis.size
        return range(self.axis.rank * share, (self.axis.rank + 1) * share)

    def exchange(self, counts: Tensor) -> RowExchange:
        """Exchange the numbers of rows for each expert, which the host reads.

        Args:
            counts: (E,) int64, rows of this rank for each expert.
        """
        size = self.axis.size
        of_experts = self.comm.all_to_all(counts, self.axis).view(size, -1)
        sent, received = torch.stack([counts.view(size, -1), of_experts]).tolist()
        rows = RowCounts(tuple(map(sum, sent)), tuple(map(sum, received)))
        experts = torch.arange(of_experts.shape[1], device=counts.device).repeat(size)
        order = experts.repeat_interleave(of_experts.flatten(), output_size=sum(rows.received)).argsort(stable=True)
        of_each = [sum(of_ranks) for of_ranks in zip(*received, strict=True)]
        return RowExchange(self.comm, self.axis, of_each, rows, order, order.argsort())

    def send_blocks(self, blocks: Tensor) -> Tensor:
        """Rows of this rank's experts, from all ranks: (E, C, ...), C rows of each expert, to (E / ep, ep * C, ...)."""
        of_ranks: Tensor = all_to_all(blocks, self.comm, self.axis).unflatten(0, (self.axis.size, -1))
        return of_ranks.transpose(0, 1).flatten(1, 2)

    def give_back_blocks(self, blocks: Tensor) -> Tensor:
        """Rows of this rank, from all experts: (E / ep, ep * C, ...) to (E, C, ...)."""
        of_ranks = blocks.unflatten(1, (self.axis.size, -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(of_ranks, self.comm, self.axis)
