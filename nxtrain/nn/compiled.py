"""`torch.compile`, block by block.

Model code is unchanged. Blocks are alike, so one of them is compiled for all. Sharding hooks of a block run outside its
graph; recomputation and the collectives of tensor parallelism are inside.

Source: torchtitan compiles the same parts, after recomputation and before sharding (`apply_compile` in
torchtitan/distributed/compile.py of https://github.com/pytorch/torchtitan at b5bcd76).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from nxtrain.backends.base import Backend
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import CausalLM


def compile_blocks(model: nn.Module, backend: Backend) -> None:
    """Compile the blocks of a model.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        backend: Backend, whose compiler is used.

    Raises:
        ConfigError: `torch.compile` does not support the device.
    """
    if backend.compiler is None:
        reason = f"the backend {backend.name} records whole steps, and its own compiler gets them"
        raise ConfigError([Problem("compile.torch_compile", reason, hint="use false")])
    for block in cast(CausalLM, model).blocks:
        # Static shapes: graphs with dynamic shapes are slower, and TorchNeuron has none. A graph break in a block is
        # an error, not a slow run.
        compiled = torch.compile(block.forward, backend=backend.compiler, dynamic=False, fullgraph=True)
        block.forward = compiled
