"""Plain operations in place of the NKI Library's blockwise experts, with its signatures, layouts and conditions.

Arithmetic is in float64 and rounds to the type of each result, once. So this shows nothing of the kernels' own
precision, whose products are bfloat16.

Shapes: T tokens, a row of zeros among them, H hidden, I intermediate, E experts, N blocks of B rows each.

Source: src/nkilib_src/nkilib/core/moe/moe_cte/bwmm_shard_on_I.py, experimental/moe/bwd/blockwise_mm_backward.py and
moe_bwd_parameters.py in https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.neuron.blockwise import NkiBlockwise
from tests.support.nki_bounded import Launches


class ExpertAffinityScaleMode(Enum):
    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2


def _check(hidden: Tensor, affinities: Tensor, gate_up: Tensor, down: Tensor, tokens: Tensor, owner: Tensor) -> None:
    """Conditions of both kernels on two cores."""
    num_experts, width, size = down.shape
    assert hidden.dtype == affinities.dtype == gate_up.dtype == down.dtype
    assert tokens.dtype == owner.dtype == torch.int32
    assert tuple(gate_up.shape) == (num_experts, size, 2, width)
    assert tuple(affinities.shape) == (len(hidden) * num_experts, 1)
    assert hidden.shape[1] == size
    assert owner.dim() == 2
    assert width % 64 == 0, "32 for each core"


def _of_rows(affinities: Tensor, tokens: Tensor, owner: Tensor, num_experts: int) -> Tensor:
    """Affinity of each row for the expert of its block, (N, B)."""
    by_token = affinities.double().view(-1, num_experts)
    return by_token.flatten()[tokens * num_experts + owner]


def _forward(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: None = None,
    down_proj_bias: None = None,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.PRE_SCALE,
    checkpoint_activation: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H) to (T, H), with the projections of the blocks, (N, 2, I, B) and (N, B, H)."""
    assert (gate_and_up_proj_bias, down_proj_bias, checkpoint_activation) == (None, None, True)
    assert expert_affinities_scaling_mode is ExpertAffinityScaleMode.POST_SCALE
    dtype = hidden_states.dtype
    _check(
        hidden_states,
        expert_affinities_masked,
        gate_up_proj_weight,
        down_proj_weight,
        token_position_to_id,
        block_to_expert,
    )
    assert block_size % 256 == 0
    assert hidden_states.shape[1] % 512 == 0
    assert 512 <= hidden_states.shape[1] <= 8192
    tokens, owner = token_position_to_id.long().view(-1, block_size), block_to_expert.long()
    rows = hidden_states.double()[tokens]
    first, last = gate_up_proj_weight.double()[owner[:, 0]], down_proj_weight.double()[owner[:, 0]]
    projected = torch.einsum("nbh,nhci->ncib", rows, first)
    inner = F.silu(projected[:, 0]) * projected[:, 1]
    outputs = torch.einsum("nib,nih->nbh", inner, last)
    scaled = outputs * _of_rows(expert_affinities_masked, tokens, owner, len(down_proj_weight)).unsqueeze(2)
    out = torch.zeros_like(hidden_states, dtype=torch.float64)
    out = out.index_add(0, tokens.flatten(), scaled.flatten(0, 1))
    return out.to(dtype), projected.to(dtype), outputs.to(dtype)


def _backward(  # the arguments of the kernel that nxtrain gives, and those whose defaults it relies on
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    gate_up_proj_act_checkpoint_T: Tensor,
    down_proj_act_checkpoint: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    output_hidden_states_grad: Tensor,
    block_size: int,
    is_tensor_update_accumulating: bool = True,
    bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first four arguments."""
    assert (is_tensor_update_accumulating, bias) == (True, False)
    dtype = hidden_states.dtype
    given = hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight
    _check(*given, token_position_to_id, block_to_expert)
    num_experts, width, size = down_proj_weight.shape
    num_blocks = len(block_to_expert)
    assert block_size in (128, 256, 512, 1024)
    assert tuple(gate_up_proj_act_checkpoint_T.shape) == (num_blocks, 2, width, block_size)
    assert tuple(down_proj_act_checkpoint.shape) == (num_blocks, block_size, size)
    assert output_hidden_states_grad.shape == hidden_states.shape
    tokens, owner = token_position_to_id.long().view(-1, block_size), block_to_expert.long()
    rows, grad = hidden_states.double()[tokens], output_hidden_states_grad.double()[tokens]
    first, last = gate_up_proj_weight.double()[owner[:, 0]], down_proj_weight.double()[owner[:, 0]]
    affinity_grad = torch.zeros(len(hidden_states) * num_experts, dtype=torch.float64, device=rows.device)
    of_rows = (grad * down_proj_act_checkpoint.double()).sum(2)
    affinity_grad = affinity_grad.scatter(0, (tokens * num_experts + owner).flatten(), of_rows.flatten())
    grad = grad * _of_rows(expert_affinities_masked, tokens, owner, num_experts).unsqueeze(2)
    gate, values = gate_up_proj_act_checkpoint_T.double().transpose(2, 3).unbind(1)
    sigmoid = torch.sigmoid(gate)
    unit = gate * sigmoid
    inner_grad = torch.einsum("nbh,nih->nbi", grad, last)
    projected_grad = torch.stack([inner_grad * values * sigmoid * (1 + gate * (1 - sigmoid)), inner_grad * unit], dim=2)
    first_grad = torch.zeros_like(gate_up_proj_weight, dtype=torch.float64)
    first_grad = first_grad.index_add(0, owner[:, 0], torch.einsum("nbh,nbci->nhci", rows, projected_grad))
    last_grad = torch.zeros_like(down_proj_weight, dtype=torch.float64)
    last_grad = last_grad.index_add(0, owner[:, 0], torch.einsum("nbi,nbh->nih", unit * values, grad))
    rows_grad = torch.zeros_like(hidden_states, dtype=torch.float64)
    of_blocks = torch.einsum("nbci,nhci->nbh", projected_grad, first)
    rows_grad = rows_grad.index_add(0, tokens.flatten(), of_blocks.flatten(0, 1))
    return rows_grad.to(dtype), affinity_grad.unsqueeze(1).to(dtype), first_grad.to(dtype), last_grad.to(dtype)


forward, backward = Launches(_forward), Launches(_backward)
STAND_INS = NkiBlockwise(forward, backward, ExpertAffinityScaleMode.POST_SCALE)


def _jit(kernel: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`nki.jit` of a kernel that is declared for calls by other kernels."""
    assert mode == "torchxla"
    return kernel


def modules() -> dict[str, ModuleType]:
    """Modules of NKI and its library with the stand-ins, by name."""
    members: dict[str, dict[str, Any]] = {
        "nki": {"jit": _jit},
        "nkilib.core.moe.moe_cte.bwmm_shard_on_I": {"blockwise_mm_baseline_shard_intermediate": forward},
        "nkilib.core.utils.common_types": {"ExpertAffinityScaleMode": ExpertAffinityScaleMode},
        "nkilib.experimental.moe.bwd.blockwise_mm_backward": {"blockwise_mm_bwd": backward},
    }
    results: dict[str, ModuleType] = {}
    for name, of_module in members.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            results.setdefault(parent, ModuleType(parent))
        vars(results[name]).update(of_module)
    return results


def install() -> None:
    """Put the stand-ins where the true kernels are found, in a process of its own."""
    sys.modules.update(modules())
