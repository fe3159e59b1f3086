"""Adapters of experts: values by our names, and PEFT's stacked matrices of the same values, entry by entry."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nxtrain.common.dimensions import MoeShape
from nxtrain.config.check import Resolved

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def shapes_of(resolved: Resolved) -> dict[str, tuple[int, int]]:
    """Shape of each matrix of the adapters of an expert that the run trains."""
    mixture, hidden = _mixture(resolved), resolved.model.hidden_size
    r, inner, shapes = resolved.config.finetune.r, mixture.expert_size, dict[str, tuple[int, int]]()
    if GATE_UP in resolved.config.finetune.targets:
        shapes |= {"gate_up_proj.lora_A": (r, hidden)}
        shapes |= {f"{name}.lora_B": (inner, r) for name in ("gate_proj", "up_proj")}
    if DOWN in resolved.config.finetune.targets:
        shapes |= {"down_proj.lora_A": (r, inner), "down_proj.lora_B": (hidden, r)}
    return shapes


def expert_adapters(resolved: Resolved, generator: torch.Generator) -> dict[str, Tensor]:
    """Whole matrices of the adapters of all experts, none of them zero, by our names."""
    found: dict[str, Tensor] = {}
    if resolved.dimensions.mixture is None:
        return found
    mixture = resolved.dimensions.mixture
    for layer in range(resolved.model.num_hidden_layers):
        if layer in resolved.dimensions.dense_layers:
            continue
        for expert in range(mixture.num_experts):
            for name, shape in shapes_of(resolved).items():
                std = 1 / max(shape[1], 4) ** 0.5
                drawn = torch.randn(shape, generator=generator) * std * (1.0 if name.endswith("lora_A") else 0.3)
                found[f"model.layers.{layer}.{mixture.module}.experts.{expert}.{name}"] = drawn
    return found


def of_peft(name: str, weights: Mapping[str, Tensor], resolved: Resolved) -> Tensor:
    """PEFT's value of a matrix, from those of each expert."""
    if ".experts" not in name:
        return weights[name]
    number, module, matrix = _place(name, resolved)
    if name.endswith("lora_A"):
        return torch.cat([weights[f"{module}.{expert}.{matrix}.lora_A"] for expert in range(number)])
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    by_expert = []
    for expert in range(number):
        by_expert.append(torch.cat([weights[f"{module}.{expert}.{part}.lora_B"] for part in parts]))
    r = resolved.config.finetune.r
    return torch.stack([by_expert[expert][:, column] for column in range(r) for expert in range(number)], dim=1)


def of_ours(name: str, tensor: Tensor, resolved: Resolved) -> dict[str, Tensor]:
    """Our matrices of each expert, from PEFT's of all."""
    if ".experts" not in name:
        return {name: tensor}
    number, module, matrix = _place(name, resolved)
    r, found = resolved.config.finetune.r, dict[str, Tensor]()
    for expert in range(number):
        if name.endswith("lora_A"):
            found[f"{module}.{expert}.{matrix}.lora_A"] = tensor[expert * r : (expert + 1) * r]
            continue
        own = tensor[:, expert::number]
        half = len(own) // 2
        parts = {matrix: own} if matrix == "down_proj" else {"gate_proj": own[:half], "up_proj": own[half:]}
        found |= {f"{module}.{expert}.{part}.lora_B": value for part, value in parts.items()}
    return found


def _place(name: str, resolved: Resolved) -> tuple[int, str, str]:
    """Number of experts, our name of their module, and the matrix that PEFT's wrapper adapts."""
    mixture, targets = _mixture(resolved), resolved.config.finetune.targets
    block, _, rest = name.partition(".mlp.experts")
    is_down = DOWN in targets and "base_layer" not in rest
    return mixture.num_experts, f"{block}.{mixture.module}.experts", "down_proj" if is_down else "gate_up_proj"


def _mixture(resolved: Resolved) -> MoeShape:
    assert resolved.dimensions.mixture is not None
    return resolved.dimensions.mixture
