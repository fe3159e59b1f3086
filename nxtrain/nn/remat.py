"""Recomputation: what the backward pass computes again instead of keeping it from the forward pass.

Models and blocks know nothing of it. It takes hold of modules that are there anyway: the blocks that a model names, and
the attention cores and feed-forwards inside them. Only what enters such a module is kept; the module runs again, with
its collectives, when its backward pass begins.

Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198) section 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any, Literal, cast

from torch import Tensor, nn

from nxtrain.backends.base import Kernels
from nxtrain.family import CausalLM
from nxtrain.nn.attention import CausalAttention
from nxtrain.nn.mlp import GatedMLP

Remat = Literal["none", "selective", "full"]

LONG_SEQUENCE = 8192
"""Tokens per sequence from which `selective` takes feed-forwards too.

Source: the Llama recipes of NeuronX Distributed, which recompute CoreAttention, and LlamaMLP too at this length.
"""


def recompute_parts(model: nn.Module, remat: Remat, seq_len: int, kernels: Kernels) -> None:
    """Let the backward pass of a model compute parts of it again.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        remat: Which parts: none, attention cores (and feed-forwards of long sequences), or whole blocks.
        seq_len: Tokens per sequence.
        kernels: Of the device.
    """

    def recomputed(part: nn.Module, *inputs: Any) -> Tensor:
        return kernels.recompute(partial(type(part).forward, part), *inputs)

    for part in _parts(model, remat, seq_len):
        # Not a wrapper around the module, which would rename its parameters and stand between it and its hooks: what
        # shards a block over ranks gathers it before its backward pass, so that the block finds itself whole. One
        # function for all parts: a compiler sees that the blocks are alike, and compiles one.
        part.forward = MethodType(recomputed, part)


def _parts(model: nn.Module, remat: Remat, seq_len: int) -> Iterable[nn.Module]:
    if remat == "none":
        return ()
    if remat == "full":
        return cast(CausalLM, model).blocks
    kinds = (CausalAttention, GatedMLP) if seq_len >= LONG_SEQUENCE else (CausalAttention,)
    return [module for module in model.modules() if isinstance(module, kinds)]
