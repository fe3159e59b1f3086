"""Mixture-of-experts feed-forward by a fused kernel of the device.

One call of the kernel gathers the tokens of each block, computes the block's expert, and sums the outputs per token.

Shapes: T tokens, k experts of a token, D hidden size, F intermediate size of this rank, E experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxtrain.common.blockwise import BlockwiseKernel, ExpertBlocks
from nxtrain.parallel.expert_products import ExpertMatrices
from nxtrain.parallel.slot_rows import block_rows


def by_kernel(  # 6 arguments: tokens, their routing, the experts, the bound of the rows, and the kernel
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertMatrices, most_slots: int, kernel: BlockwiseKernel
) -> Tensor:
    """Compute the experts of this rank with a fused kernel and sum their weighted outputs per token: (T, D) to (T, D).

    Args:
        x: (T, D) tokens.
        weights: (T, k) float32, the router's weight of each slot (token-expert pair).
        indices: (T, k) integers, expert of each slot; E marks an expert of another rank.
        experts: Matrices of the experts, without biases, adapters or clamped units.
        most_slots: Most slots that this rank's experts compute.
        kernel: Fused kernel of the device.
    """
    num_experts = experts.number
    height = kernel.height(most_slots, num_experts)
    rows, owner, _ = block_rows(indices, num_experts, most_slots=most_slots, height=height)
    assert owner is not None
    is_chosen = indices.unsqueeze(2) == torch.arange(num_experts, device=indices.device)
    of_experts = torch.where(is_chosen, weights.unsqueeze(2), torch.zeros_like(weights).unsqueeze(2)).sum(1)
    blocks = ExpertBlocks(rows.slots // rows.k, owner)
    out: Tensor = _Blockwise.apply(x, of_experts, experts.gate_up, experts.down, blocks, kernel)
    return out


class _Blockwise(torch.autograd.Function):
    """Autograd function whose forward is `BlockwiseKernel.products` and backward is `BlockwiseKernel.gradients`."""

    @staticmethod
    def forward(  # 7 arguments: those of the kernel
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        blocks: ExpertBlocks,
        kernel: BlockwiseKernel,
    ) -> Tensor:
        out, *kept = kernel.products(x, weights, gate_up, down, blocks)
        ctx.kernel = kernel
        ctx.save_for_backward(x, weights, gate_up, down, blocks.tokens, blocks.owner, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, tokens, owner, *kept = ctx.saved_tensors
        blocks = ExpertBlocks(tokens, owner)
        grads = ctx.kernel.gradients(grad.contiguous(), x, weights, gate_up, down, blocks, tuple(kept))
        needed = [g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad, strict=False)]
        return *needed, None, None
