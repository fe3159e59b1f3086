"""Frozen linear layers in NF4 for QLoRA: a matrix is dequantized for each product, forward and backward.

Model code is unchanged. The weight of an existing layer is replaced by its packed form, with the same name. Checkpoints
have no frozen weights, and every start quantizes the base weights again.

Source: Dettmers et al. 2023 (arXiv:2305.14314) equation 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxtrain.backends.nf4 import Packing, Part
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import CausalLM
from nxtrain.common.kernels import Kernels
from nxtrain.common.sharding import ShardSpec
from nxtrain.config.finetune import quantized_cut
from nxtrain.nn.init import Fill
from nxtrain.parallel.linear import ColumnLinear, RowLinear
from nxtrain.parallel.regions import TensorParallel


class _RestoredProduct(torch.autograd.Function):
    """Autograd function x @ weight.T with a packed weight, which saves only the packed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, packing: Packing, kernels: Kernels) -> Tensor:
        ctx.packing, ctx.kernels = packing, kernels
        ctx.save_for_backward(packed)
        return kernels.linear(x, packing.restore(packed))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (packed,) = ctx.saved_tensors
        return ctx.kernels.matmul(grad, ctx.packing.restore(packed)), None, None, None


@dataclass(frozen=True)
class Restored:
    """Linear product with a packed NF4 weight, which is dequantized for the product.

    Args:
        packing: Packed format of the weight.
        kernels: Kernels of the device.
    """

    packing: Packing
    kernels: Kernels

    def __call__(self, x: Tensor, packed: Tensor) -> Tensor:
        """Compute x @ weight.T: (..., I) to (..., O)."""
        out: Tensor = _RestoredProduct.apply(x, packed, self.packing, self.kernels)
        return out


def quantize(model: nn.Module, tp: TensorParallel) -> None:
    """Replace the weights of linear layers in a model's blocks by packed NF4 weights, without values yet.

    Args:
        model: A `CausalLM` on the meta device, changed in place; its parameters keep their names.
        tp: Tensor parallel context of the layers.

    Raises:
        ConfigError: Tensor parallelism would cut a block of weights that share a scale.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    for layer in chain.from_iterable(block.modules() for block in cast(CausalLM, model).blocks):
        if isinstance(layer, ColumnLinear | RowLinear):
            name = paths[id(layer)].rpartition(".")[2]
            packing = _packing(layer.specs["weight"], name, tp)
            blank = torch.empty(packing.packed_shape, dtype=packing.dtype, device="meta")
            layer.weight = nn.Parameter(blank, requires_grad=False)
            layer.restored = Restored(packing, tp.kernels)


def filling(model: nn.Module, read: Callable[[str], Tensor], fill: Fill) -> Fill:
    """Fill function for `materialize` that quantizes the packed weights, and delegates other parameters.

    Args:
        model: The model.
        read: Reads a whole tensor by its global name.
        fill: Fill function of the other parameters.
    """
    quantized: dict[str, tuple[ShardSpec, Packing]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, ColumnLinear | RowLinear) and isinstance(layer.restored, Restored):
            quantized[f"{path}.weight"] = layer.specs["weight"], layer.restored.packing

    def fill_one(name: str, local: Tensor) -> None:
        if name not in quantized:
            return fill(name, local)
        spec, packing = quantized[name]
        wholes = [read(spec.global_name(name, segment)) for segment in spec.segments]
        local.copy_(packing.pack(wholes))
        return None

    return fill_one


def _packing(spec: ShardSpec, name: str, tp: TensorParallel) -> Packing:
    problems = list(quantized_cut(name, spec, tp.axis))
    if problems:
        raise ConfigError(problems)
    parts = tuple(
        Part(cast(tuple[int, int], spec.global_shape(piece.segment)), spec.dim or 0, piece.start, piece.length)
        for piece in spec.pieces(tp.axis)
    )
    return Packing(parts, cast(tuple[int, int], spec.local_shape(tp.axis)), tp.dtype)
