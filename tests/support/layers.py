"""Single layers with given weights, on one rank of a tensor parallel axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec
from nxtrain.nn.init import materialize
from nxtrain.parallel.regions import TensorParallel

Layer = TypeVar("Layer", bound=nn.Module)

ALONE = Axis("tp", 0, ((0,),))
"""The axis of a rank that shares nothing."""


def alone(dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> TensorParallel:
    """Tensor parallel context of layers that are not sharded."""
    return TensorParallel(ALONE, C10dCollectives(1), kernels or FusedKernels(), dtype)


def filled(
    layer: Layer, axis: Axis, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor] | None = None
) -> Layer:
    """Give a layer on the meta device its weight, cut out of whole tensors by segment name (empty if only one)."""
    specs = cast(Mapping[str, ShardSpec], layer.specs)

    def fill(name: str, local: Tensor) -> None:
        local.copy_(specs[name].shard((biases or {}) if name == "bias" else weights, axis))

    materialize(layer, lambda host: host, fill)
    return layer


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same in every process."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)
