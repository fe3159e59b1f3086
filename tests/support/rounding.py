"""Stochastic rounding of whole tensors in this process."""

from __future__ import annotations

import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.rounding import step_hash
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.optim.rounding import rounding_keys
from tests.support.adamw import host

CPU = CpuKernels()


def rounded(
    x: Tensor, step: int = 1, *, seed: int = 0, name: str = "w", kind: str = "param", kernels: Kernels = CPU
) -> Tensor:
    """`x` rounded as the whole of a parameter."""
    layout = Layout(ParamTable({name: ShardSpec(tuple(x.shape))}), Mesh.build(1, 0))
    key = rounding_keys(layout, {name: x}, kind, seed, host)[name]
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    kernels.stochastic_round(x.clone(), out, key, step_hash(torch.tensor(float(step))))
    return out
