"""Dispatch of tokens to mixture-of-experts experts, on this rank or on the ranks that hold the experts.

On eager devices, an expert computes as many rows as it has slots, rounded up to the multiple that the matrix products
need. The host reads the numbers of rows, unless the products read them on the device. A device that records graphs
computes blocks with equal numbers of rows. Some blocks are empty, so that the graph does not depend on the routing.

Shapes: T tokens, k experts of a token, D hidden size, F intermediate size of this rank, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nxtrain.common.blockwise import BlockwiseKernel
from nxtrain.common.kernels import Kernels, RowGroups
from nxtrain.parallel.blockwise_experts import by_kernel
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.expert_products import ExpertMatrices
from nxtrain.parallel.slot_rows import SlotRows, block_rows, sorted_rows

EVEN_ROWS = 2
"""Largest ratio of computed to needed rows at which each expert gets one block; beyond it, blocks are smaller."""


def capacity_of(num_slots: int, num_experts: int, factor: float) -> int:
    """Capacity of an expert: most slots (token-expert pairs) that it computes, of `num_slots` for all experts.

    Source: Fedus et al. 2021 (arXiv:2101.03961) equation 3.
    """
    return math.ceil(num_slots * factor / num_experts)


def num_dropped(indices: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Number of slots (token-expert pairs) beyond the capacities of their experts, () float32."""
    numbers = torch.arange(num_experts, device=indices.device)
    counts = (indices.flatten().unsqueeze(1) == numbers).sum(0, dtype=torch.float32)
    return (counts - capacity).clamp(min=0).sum()


def dispatch(  # 8 arguments: tokens, their routing, the experts, the limit of an expert, and the ranks
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertMatrices,
    num_experts: int,
    kernels: Kernels,
    capacity: int | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Tensor:
    """Weighted sum of the experts' outputs for each token: (T, D) to (T, D).

    The host reads the number of rows of each expert in two cases: it starts the products one by one, or ranks exchange
    rows.

    Args:
        x: (T, D) tokens.
        weights: (T, k) float32, the router's weights.
        indices: (T, k) integers, the experts of each token; a token names each expert at most once.
        experts: Matrices of this rank's experts.
        num_experts: E, over all ranks.
        kernels: Kernels of the device.
        capacity: As for `sorted_rows`.
        expert_parallel: Ranks that divide the experts; None if this rank has all experts.

    Returns:
        (T, D); a partial sum over the tensor parallel ranks if the intermediate size is sharded.
    """
    grouping = kernels.grouping(x.dtype, experts.sizes)
    if expert_parallel is None:
        rows, heights = sorted_rows(indices, num_experts, capacity, grouping)
        own, scale = rows.spread(x), rows.weights(weights)
        groups = RowGroups.of(heights, grouping)
        return rows.collect(experts.of_groups(own, scale, groups, kernels))
    rows, counts = sorted_rows(indices, num_experts, capacity)
    exchange = expert_parallel.exchange(counts, len(rows.slots), grouping)
    own, scale = exchange.send(rows.spread(x)), exchange.send(rows.weights(weights))
    return rows.collect(exchange.return_rows(experts.of_groups(own, scale, exchange.groups, kernels)))


def static_dispatch(  # 8 arguments: as `dispatch`
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertMatrices,
    num_experts: int,
    capacity: int | None = None,
    expert_parallel: ExpertParallel | None = None,
    kernel: BlockwiseKernel | None = None,
) -> Tensor:
    """Weighted sum of the experts' outputs for each token, by operations whose shapes do not depend on the routing.

    Arguments and result are those of `dispatch`. The argument `kernel` replaces `kernels`: a fused kernel of the
    device.

    Ranks exchange only blocks of equal size. Without a capacity, every rank gets the tokens of all ranks. Its rows then
    suffice for the routing that sends most tokens to its experts. The fused kernel is used without a capacity, for
    experts without biases, adapters or clamped units.
    """
    has_kernel = kernel is not None and capacity is None and experts.is_plain
    if expert_parallel is None:
        if kernel is not None and has_kernel:
            return by_kernel(x, weights, indices, experts, indices.numel(), kernel)
        return _of_blocks(x, weights, *block_rows(indices, num_experts, capacity), experts)
    num_own = experts.number
    if capacity is None:
        x, weights, indices = expert_parallel.send_tokens(x, weights, indices, num_own)
        most_of_token = min(indices.shape[1], num_own)
        most_slots = x.shape[0] * most_of_token
        if kernel is not None and has_kernel:
            return expert_parallel.sum_tokens(by_kernel(x, weights, indices, experts, most_slots, kernel))
        # One block per expert has room for every token and copies no matrices. With many experts it has too many rows.
        capacity = x.shape[0] if num_own <= EVEN_ROWS * most_of_token else None
        grouped = block_rows(indices, num_own, capacity, most_slots=most_slots)
        return expert_parallel.sum_tokens(_of_blocks(x, weights, *grouped, experts))
    rows, _, num_blocks = block_rows(indices, num_experts, capacity)
    blocks = expert_parallel.send_blocks(rows.spread(x).unflatten(0, (num_blocks, -1)))
    scale = expert_parallel.send_blocks(rows.weights(weights).unflatten(0, (num_blocks, -1)))
    out = experts.of_blocks(blocks, scale, None)
    return rows.collect(expert_parallel.return_blocks(out).flatten(0, 1))


def _of_blocks(
    x: Tensor, weights: Tensor, rows: SlotRows, owner: Tensor | None, num_blocks: int, experts: ExpertMatrices
) -> Tensor:
    """Weighted sum over the experts of this rank for each token, computed in blocks of equal size: (T, D) to (T, D)."""
    blocks = rows.spread(x).unflatten(0, (num_blocks, -1))
    scale = rows.weights(weights).unflatten(0, (num_blocks, -1))
    return rows.collect(experts.of_blocks(blocks, scale, owner).flatten(0, 1))
