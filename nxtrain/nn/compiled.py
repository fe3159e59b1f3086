"""`torch.compile`, block by block.

Models and blocks know nothing of it. Blocks are alike, so one of them is compiled for all, and what shards a block over
ranks works around it as before. Recomputation and the collectives of tensor parallelism are parts of the graph.

Source: torchtitan compiles the same parts, after recomputation and before sharding (`apply_compile` in
torchtitan/distributed/compile.py of https://github.com/pytorch/torchtitan at b5bcd76).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from nxtrain.backends.base import Backend
from nxtrain.errors import ConfigError, Problem
from nxtrain.family import CausalLM


def compile_blocks(model: nn.Module, backend: Backend) -> None:
    """Let the blocks of a model run as compiled graphs.

    Args:
        model: A `CausalLM`, changed in place; its parameters keep their names.
        backend: The device, whose compiler is used.

    Raises:
        ConfigError: The device is not served by `torch.compile`.
    """
    if backend.compiler is None:
        reason = f"the backend {backend.name} records whole steps, and its own compiler gets them"
        raise ConfigError([Problem("compile.torch_compile", reason, hint="use false")])
    for block in cast(CausalLM, model).blocks:
        # Shapes stay what they are: graphs that take any shape are slower, and TorchNeuron has none. A block that does
        # not become one graph is an error, not a slow run.
        compiled = torch.compile(block.forward, backend=backend.compiler, dynamic=False, fullgraph=True)
        block.forward = compiled
