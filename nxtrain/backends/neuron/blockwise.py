"""Feed-forward layers of experts by the blockwise kernels of the NKI Library.

The kernels of Neuron SDK 2.29 are `blockwise_mm_baseline_shard_intermediate` forward and `blockwise_mm_bwd` backward.
The forward kernel also returns both projections of each block. The kernels take weights as (inputs, outputs), so each
pass transposes nxtrain's weights. Padding rows of a block refer to an extra token of zeros. The sum over the experts of
a token is rounded to bfloat16 once per expert.

These calls have not run on Trainium. Tests check layouts, values and gradients with a mock of the kernels.

Shapes: T tokens, D hidden, F intermediate of this rank, E experts, n blocks of B rows each.

Source: src/nkilib_src/nkilib/core/moe/moe_cte/bwmm_shard_on_I.py and experimental/moe/bwd/blockwise_mm_backward.py in
https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29. The mode `torchxla` is that of
src/neuronx_distributed/modules/moe/nki_import.py in https://github.com/aws-neuron/neuronx-distributed at fbac349.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends.neuron.experts import CORES, MAX_BLOCK_ROWS, MIN_BLOCK_ROWS, SDK
from nxtrain.common.blockwise import BlockwiseKernel, ExpertBlocks
from nxtrain.common.errors import BackendError


@dataclass(frozen=True)
class NkiBlockwise(BlockwiseKernel):
    """Blockwise expert kernels of the NKI Library, forward and backward.

    Args:
        forward, backward: NKI kernels; `kernel[cores]` splits a kernel over physical cores.
        scale_after: Value of `expert_affinities_scaling_mode` for router weights that multiply the experts' outputs.
    """

    forward: Any
    backward: Any
    scale_after: Any

    def height(self, num_slots: int, num_experts: int) -> int:
        return MAX_BLOCK_ROWS if num_slots >= MAX_BLOCK_ROWS * num_experts else MIN_BLOCK_ROWS

    def products(
        self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, projected, outputs = self.forward[CORES](
            *_operands(x, weights, gate_up, down),
            block_size=blocks.height,
            token_position_to_id=blocks.tokens.int(),
            block_to_expert=blocks.owner.int().unsqueeze(1),
            expert_affinities_scaling_mode=self.scale_after,
            checkpoint_activation=True,
        )
        return out[:-1], projected, outputs

    def gradients(  # 8 arguments: as `BlockwiseKernel.gradients`
        self,
        grad: Tensor,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        blocks: ExpertBlocks,
        kept: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_grad, weights_grad, first_grad, last_grad = self.backward[CORES](
            *_operands(x, weights, gate_up, down),
            *kept,
            blocks.tokens.int(),
            blocks.owner.int().unsqueeze(1),
            _with_zeros(grad),
            block_size=blocks.height,
        )
        by_token = weights_grad.view(-1, weights.shape[1])[:-1].to(weights.dtype)
        gate_up_grad = first_grad.permute(0, 2, 3, 1).reshape(gate_up.shape)
        down_grad = last_grad.permute(2, 0, 1).reshape(down.shape)
        return x_grad[:-1], by_token, gate_up_grad, down_grad


def _operands(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First arguments of both kernels: tokens and router weights with a token of zeros, and the transposed weights.

    The shapes are (T + 1, D), ((T + 1) * E, 1), (E, D, 2, F) and (E, F, D).
    """
    num_experts = weights.shape[1]
    first = gate_up.unflatten(0, (num_experts, 2, -1)).permute(0, 3, 1, 2).contiguous()
    last = down.unflatten(1, (num_experts, -1)).permute(1, 2, 0).contiguous()
    return _with_zeros(x), _with_zeros(weights.to(x.dtype)).view(-1, 1), first, last


def _with_zeros(x: Tensor) -> Tensor:
    """Append a row of zeros, the token to which padding rows of a block refer."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def load() -> NkiBlockwise:
    """Import the blockwise expert kernels of the installed NKI Library.

    Raises:
        BackendError: The kernels cannot be imported.
    """
    try:
        import nki
        from nkilib.core.moe.moe_cte.bwmm_shard_on_I import blockwise_mm_baseline_shard_intermediate as forward
        from nkilib.core.utils.common_types import ExpertAffinityScaleMode
        from nkilib.experimental.moe.bwd.blockwise_mm_backward import blockwise_mm_bwd as backward
    except ImportError as error:
        raise BackendError(
            f"Neuron SDK {SDK} is installed, but the experts of its NKI Library cannot be imported: {error}; use "
            "backend.experts=plain, or install packages of one release of the Neuron SDK"
        ) from error
    # The library declares the forward kernel for calls by other kernels only, so it is wrapped here.
    return NkiBlockwise(nki.jit(forward, mode="torchxla"), backward, ExpertAffinityScaleMode.POST_SCALE)
