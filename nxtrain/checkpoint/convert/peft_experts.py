"""LoRA adapters of experts in PEFT's format, which has one pair of matrices for all experts of a block.

E is the number of experts, and r the rank. Matrix A has the rows of the experts in sequence: (E * r, inputs). The
columns of matrix B alternate between experts: (outputs, r * E). PEFT wraps a module once for each adapted parameter. So
the adapter of the last parameter has the module's name, and other adapters have `base_layer` in their names.

Source: `ParamWrapper` of PEFT 0.21, `get_delta_factors`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from nxtrain.common.dimensions import MoeShape
from nxtrain.nn.lora import EXPERT_TARGETS, A, B

GATE_UP, DOWN = EXPERT_TARGETS
_INNER = ".base_layer"
_OF_EXPERT = re.compile(r"\.\w+\.experts\.(\d+)\.(\w+)")


def in_mlp(name: str) -> str:
    """Rename an expert's matrix to the module `mlp`, in which transformers 5 has the experts of every family."""
    return _OF_EXPERT.sub(r".mlp.experts.\1.\2", name)


def weights_of(layer: str, mixture: MoeShape | None) -> str:
    """Name of the base weight of an adapted layer, given the name of its matrix B's layer."""
    match = _OF_EXPERT.search(layer)
    if match is None or mixture is None:
        return f"{layer}.weight"
    own = {"gate_proj": mixture.gate, "up_proj": mixture.up, "down_proj": mixture.down}
    matrix = own.get(match[2], match[2])  # Mixtral's own names, as in adapters that PEFT wrote with transformers 4
    return f"{layer[: match.start()]}.{mixture.module}.experts.{match[1]}.{matrix}.weight"


def layer_of_a(layer: str) -> str:
    """Name of the layer with the matrix A for a matrix B's layer; an expert's gate and up projections share A."""
    match = _OF_EXPERT.search(layer)
    if match is None or match[2] == "down_proj":
        return layer
    return f"{layer.rpartition('.')[0]}.gate_up_proj"


def targets_of(layers: Collection[str]) -> set[str]:
    """Values of `finetune.targets` that adapt these layers."""
    targets = set[str]()
    for layer in layers:
        leaf = layer.rpartition(".")[2]
        if _OF_EXPERT.search(layer) is None:
            targets.add(leaf)
        else:
            targets.add(DOWN if leaf == "down_proj" else GATE_UP)
    return targets


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the adapter matrices of the experts into the tensors of PEFT's format, by name."""
    renamed: dict[str, Tensor] = {}
    matrices: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _OF_EXPERT.search(name)
        if match is None:
            renamed[name] = tensor
            continue
        of_module = matrices.setdefault(f"{name[: match.start()]}.mlp.experts", {})
        of_module.setdefault(name[match.start(2) :], {})[int(match[1])] = tensor
    for module, by_name in matrices.items():
        whole = {}
        for name, of_experts in by_name.items():
            whole[name] = torch.stack([of_experts[expert] for expert in sorted(of_experts)])
        inner = module
        if f"down_proj.{A}" in whole:
            renamed[f"{module}.{A}"] = whole[f"down_proj.{A}"].flatten(0, 1)
            renamed[f"{module}.{B}"] = _columns_in_turn(whole[f"down_proj.{B}"])
            inner += _INNER
        if f"gate_up_proj.{A}" in whole:
            renamed[f"{inner}.{A}"] = whole[f"gate_up_proj.{A}"].flatten(0, 1)
            both = torch.cat([whole[f"gate_proj.{B}"], whole[f"up_proj.{B}"]], dim=1)
            renamed[f"{inner}.{B}"] = _columns_in_turn(both)
    return renamed


def of_each(tensors: Mapping[str, Tensor], r: int, targets: Collection[str]) -> dict[str, Tensor]:
    """Split stacked tensors of PEFT's format into adapter matrices per expert.

    Args:
        tensors: Adapter matrices by name, such as `model.layers.0.mlp.experts.lora_A`.
        r: Rank of the adapter.
        targets: `target_parameters` of the adapter.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        module = layer.removesuffix(_INNER)
        if not module.endswith(".experts"):
            renamed[name] = tensor
            continue
        adapts_down = any(f".{module}.down_proj".endswith(f".{target}") for target in targets)
        of_down = adapts_down and not layer.endswith(_INNER)
        if leaf == A:
            matrix = "down_proj" if of_down else "gate_up_proj"
            for expert, part in enumerate(tensor.unflatten(0, (-1, r))):
                renamed[f"{module}.{expert}.{matrix}.{A}"] = part
            continue
        for expert, part in enumerate(tensor.unflatten(1, (r, -1)).unbind(-1)):
            if of_down:
                renamed[f"{module}.{expert}.down_proj.{B}"] = part
                continue
            gate, up = part.chunk(2)
            renamed[f"{module}.{expert}.gate_proj.{B}"] = gate
            renamed[f"{module}.{expert}.up_proj.{B}"] = up
    return renamed


def _columns_in_turn(matrices: Tensor) -> Tensor:
    """Interleave the columns of the experts: (E, outputs, r) to (outputs, r * E)."""
    return matrices.permute(1, 2, 0).flatten(1)
