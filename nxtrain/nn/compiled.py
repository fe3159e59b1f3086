"""Application of `torch.compile` to each block of a model, or to the whole forward and backward pass.

Model code is unchanged. Blocks are alike, so one compiled graph serves all blocks. Sharding hooks of a block run
outside of its graph. Activation checkpointing and tensor parallel collectives are inside. A whole pass has one forward
and one backward graph, with embedding, loss, and the collectives of `graph_sharding`. Its compile time grows with the
number of blocks.

Source: torchtitan compiles the same parts, after activation checkpointing and before sharding (`apply_compile` in
torchtitan/distributed/compile.py of https://github.com/pytorch/torchtitan at b5bcd76).
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn

from nxtrain.backends.base import Backend
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import CausalLM
from nxtrain.nn.dropout import count_outside


def compile_model(model: nn.Module, backend: Backend, *, whole: bool) -> None:
    """Apply `torch.compile` to the blocks of a model, or to its whole loss.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        backend: Backend that provides the compiler.
        whole: Compile one graph from token ids to the loss, instead of one per block.

    Raises:
        ConfigError: `torch.compile` does not support the device.
    """
    if backend.compiler is None:
        reason = f"the backend {backend.name} records whole steps for its own compiler"
        raise ConfigError([Problem("compile.torch_compile", reason, hint="use false")])
    # Static shapes: graphs with dynamic shapes are slower, and TorchNeuron has none. A graph break is an error, not a
    # slow run.
    compiled = partial(
        torch.compile, backend=backend.compiler, dynamic=False, fullgraph=True, options=backend.compiler_options
    )
    lm = cast(CausalLM, model)
    if whole:
        lm.loss = compiled(lm.loss)  # type: ignore[method-assign]
        count_outside(model)
        return
    for block in lm.blocks:
        block.forward = compiled(block.forward)
