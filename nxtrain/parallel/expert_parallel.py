"""Expert parallelism: each rank of an axis holds some experts, and computes them for the tokens of all the axis' ranks.

The ranks first exchange the numbers of rows for each expert, then the rows. Outputs return by the reverse exchange. A
rank whose experts receive no token still takes part in the collectives. An expert sees its rows in the order of the
sending ranks.

Shapes: E experts of all ranks; N rows of this rank, sorted by expert; M rows of this rank's experts, sorted by expert,
then by rank.

Source: Lepikhin et al. 2020 (arXiv:2006.16668) section 3; Gale et al. 2022 (arXiv:2211.15841) section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives, RowCounts
from nxtrain.common.kernels import Grouping, RowGroups
from nxtrain.common.mesh import Axis
from nxtrain.parallel.regions import all_to_all
from nxtrain.parallel.slot_rows import SlotRows, sorted_rows


@dataclass(frozen=True)
class RowExchange:
    """Exchange of token rows between expert parallel ranks, after the ranks have exchanged the row counts.

    Args:
        comm, axis: Collectives and the expert parallel axis.
        groups: Rows of each expert of this rank, M in all.
        rows: Numbers of rows that this rank sends to each rank and receives from it, R received in all.
        received: Order of the received R rows by expert.
    """

    comm: Collectives
    axis: Axis
    groups: RowGroups
    rows: RowCounts
    received: SlotRows

    def send(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts and return the rows received for this rank: (N, ...) to (M, ...)."""
        return self.received.spread(all_to_all(rows, self.comm, self.axis, self.rows))

    def return_rows(self, rows: Tensor) -> Tensor:
        """Return expert outputs to the ranks that sent the rows: (M, ...) to (N, ...); the inverse of `send`."""
        return all_to_all(self.received.collect(rows), self.comm, self.axis, self.rows.back)


@dataclass(frozen=True)
class ExpertParallel:
    """Ranks that divide the experts of every block between them.

    Args:
        axis: Expert parallel axis; each rank has equally many experts, with adjacent numbers.
        comm: Collectives.
    """

    axis: Axis
    comm: Collectives

    def own(self, num_experts: int) -> range:
        """Indices of the experts that this rank holds, among all experts."""
        share = num_experts // self.axis.size
        return range(self.axis.rank * share, (self.axis.rank + 1) * share)

    def exchange(self, counts: Tensor, num_rows: int, grouping: Grouping) -> RowExchange:
        """Exchange the row counts of all experts between ranks; the host reads the counts.

        Args:
            counts: (E,) int64, rows of this rank for each expert.
            num_rows: N.
            grouping: Requirement of the matrix products on the rows of an expert.

        Returns:
            Exchange of rows that fits the counts.
        """
        size = self.axis.size
        of_experts = self.comm.all_to_all(counts, self.axis).view(size, -1)
        if grouping.even:
            share = tuple(num_rows // size + int(rank < num_rows % size) for rank in range(size))
            rows = RowCounts(share, share)
        else:
            rows = _read(counts.view(size, -1), of_experts)
        experts = torch.arange(of_experts.shape[1], device=counts.device).repeat(size)
        experts = experts.repeat_interleave(of_experts.flatten(), output_size=sum(rows.received))
        in_order, heights = sorted_rows(experts.unsqueeze(1), of_experts.shape[1], grouping=grouping)
        return RowExchange(self.comm, self.axis, RowGroups.of(heights, grouping), rows, in_order)

    def send_tokens(self, x: Tensor, weights: Tensor, indices: Tensor, num_own: int) -> tuple[Tensor, Tensor, Tensor]:
        """Send all tokens of each rank to every rank, by operations whose shapes do not depend on the routing.

        Args:
            x, weights, indices: (T, D), (T, k) and (T, k) of this rank, experts numbered over all ranks.
            num_own: Experts of a rank.

        Returns:
            (ep * T, D), and (ep * T, k) twice: tokens, weights and expert indices of all ranks. The experts are
            numbered on this rank. An expert of another rank has the number `num_own`, and the weight 0.
        """
        size = self.axis.size
        first = torch.arange(size, device=indices.device).view(-1, 1, 1) * num_own
        of_ranks = indices - first
        is_there = (of_ranks >= 0) & (of_ranks < num_own)
        numbers = torch.where(is_there, of_ranks, num_own).to(torch.int32)
        tokens = all_to_all(x.expand(size, *x.shape), self.comm, self.axis)
        own_weights = all_to_all(torch.where(is_there, weights, 0.0), self.comm, self.axis)
        own_numbers = self.comm.all_to_all(numbers.contiguous(), self.axis)
        return tokens.flatten(0, 1), own_weights.flatten(0, 1), own_numbers.flatten(0, 1)

    def sum_tokens(self, sums: Tensor) -> Tensor:
        """Send partial sums back to the ranks that own the tokens, and add them per token: (ep * T, D) to (T, D)."""
        of_ranks: Tensor = all_to_all(sums, self.comm, self.axis).unflatten(0, (self.axis.size, -1))
        return of_ranks.sum(0)

    def send_blocks(self, blocks: Tensor) -> Tensor:
        """Send one block of C rows to each expert: (E, C, ...) of this rank to (E / ep, ep * C, ...) of its experts."""
        of_ranks: Tensor = all_to_all(blocks, self.comm, self.axis).unflatten(0, (self.axis.size, -1))
        return of_ranks.transpose(0, 1).flatten(1, 2)

    def return_blocks(self, blocks: Tensor) -> Tensor:
        """Return expert outputs to the ranks that sent the blocks: (E / ep, ep * C, ...) to (E, C, ...)."""
        of_ranks = blocks.unflatten(1, (self.axis.size, -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(of_ranks, self.comm, self.axis)


def _read(sent: Tensor, received: Tensor) -> RowCounts:
    """Numbers of rows that this rank exchanges with each rank, from (ep, E / ep) row counts of each expert."""
    of_sent, of_received = torch.stack([sent, received]).tolist()
    return RowCounts(tuple(map(sum, of_sent)), tuple(map(sum, of_received)))
