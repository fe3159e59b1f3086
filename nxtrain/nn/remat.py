"""Activation checkpointing: recomputation in the backward pass of whole blocks, or of attention and feed-forwards.

Model code is unchanged. The forward methods of existing modules are replaced. Only the inputs of these modules are
saved. A module runs again, with its collectives, when its backward pass begins. Feed-forwards of long sequences run in
chunks, so that their memory does not grow with the length.

Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198) section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from nxtrain.backends.limits import LONG_SEQUENCE
from nxtrain.common.family import CausalLM
from nxtrain.nn.attention import CausalAttention
from nxtrain.nn.mixture import MixtureOfExperts
from nxtrain.nn.mlp import GatedMLP

Remat = Literal["none", "selective", "full"]


def recompute_parts(model: nn.Module, remat: Remat, seq_len: int, recompute: Callable[..., Tensor]) -> None:
    """Apply activation checkpointing to parts of a model.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        remat: Recomputed parts: none, attention cores (and feed-forwards of long sequences), or whole blocks.
        seq_len: Tokens per sequence.
        recompute: `Kernels.recompute` of the device.
    """
    if remat == "none":
        return

    def recomputed(part: nn.Module, *inputs: Any) -> Tensor:
        return recompute(partial(type(part).forward, part), *inputs)

    def fed_forward(part: GatedMLP, x: Tensor) -> Tensor:
        num_chunks = 1
        if not torch.compiler.is_compiling():
            num_chunks = part.num_chunks(x, LONG_SEQUENCE)
        if num_chunks > 1:
            return part.in_chunks(x, num_chunks)
        if remat == "full":  # of the block
            return GatedMLP.forward(part, x)
        return recomputed(part, x)

    parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, CausalAttention)]
    if remat == "full":
        parts = [*cast(CausalLM, model).blocks]
    if seq_len >= LONG_SEQUENCE:
        # Of a whole block, experts are recomputed with the block.
        kinds = GatedMLP if remat == "full" else GatedMLP | MixtureOfExperts
        parts = [*parts, *(module for module in model.modules() if isinstance(module, kinds))]
    for part in parts:
        # A wrapper module would rename the parameters and hide the module from its hooks: sharding gathers a block
        # before its backward pass, so that the recomputation finds the whole block. One function serves all parts, so
        # that a compiler sees equal blocks, and compiles one.
        function = fed_forward if isinstance(part, GatedMLP) else recomputed
        part.forward = MethodType(function, part)
