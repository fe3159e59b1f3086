"""Stacked experts in gpt-oss files: one tensor for the matrices of all experts, and one for their biases.

The matrices are transposed: (E, inputs, outputs). Columns of the gate and up projections alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nxtrain.checkpoint.shards import TensorShard
from nxtrain.common.dimensions import MoeShape

STACKED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Names of the stacked tensors in the module of the experts."""

ReadShards = Callable[[Mapping[TensorShard, Tensor]], None]
"""Function that fills host tensors with weights; each shard is a range of rows of a weight."""


def parts_of(mixture: MoeShape, leaf: str) -> tuple[tuple[str, ...], str]:
    """Return the projections in a stacked tensor, in column order, and `weight` or `bias`."""
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if leaf.startswith("down_proj"):
        return (mixture.down,), kind
    return (mixture.gate, mixture.up), kind


def stacked(
    chunks: Sequence[TensorShard], read: ReadShards, mixture: MoeShape | None
) -> tuple[list[TensorShard], ReadShards]:
    """Stack the tensors of experts for export; return the stacked tensors, and a function that reads their rows.

    For models without stacked experts, the arguments are returned.

    Args:
        chunks: Unsharded tensors of the model, with one tensor per expert.
        read: Function that reads rows of `chunks`.
        mixture: Shape of the model's mixture of experts; None if there is none.
    """
    if mixture is None or not mixture.biases:
        return list(chunks), read
    by_name = {chunk.name: chunk for chunk in chunks}
    whole: list[TensorShard] = []
    for chunk in chunks:
        module, _, rest = chunk.name.partition(".experts.")
        if not rest:
            whole.append(chunk)
        elif rest.startswith("0.") and not rest.startswith(f"0.{mixture.up}."):
            leaf, step = ("down_proj", 1) if rest.startswith(f"0.{mixture.down}.") else ("gate_up_proj", 2)
            suffix = "_bias" if rest.endswith(".bias") else ""
            outputs, *inputs = chunk.shape
            shape = (mixture.num_experts, *inputs, step * outputs)
            whole.append(TensorShard.whole(f"{module}.experts.{leaf}{suffix}", shape, chunk.dtype))

    def read_stacked(targets: Mapping[TensorShard, Tensor]) -> None:
        for target, rows in targets.items():
            module, _, leaf = target.name.partition(".experts.")
            if leaf not in STACKED:
                read({target: rows})
                continue
            parts, kind = parts_of(mixture, leaf)
            first = target.block.offsets[0]
            for expert, matrix in enumerate(rows, start=first):
                for index, part in enumerate(parts):
                    own = by_name[f"{module}.experts.{expert}.{part}.{kind}"]
                    values = torch.empty(own.shape, dtype=own.dtype)
                    read({own: values})
                    matrix[..., index :: len(parts)].copy_(values.t() if values.dim() > 1 else values)

    return whole, read_stacked
