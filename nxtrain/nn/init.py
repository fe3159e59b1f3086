"""Random initialization of a model's weights on the host, with equal bits in every parallel layout.

A tensor is drawn in tiles. Each tile has a counter-based generator, keyed by the seed, the tensor's global name and the
tile's position. A rank draws only the tiles that overlap its shard, so no process ever holds a whole model. A weight
does not depend on tp, pp, dp, fusing, the device, or other weights of the model.

Source: Salmon et al. 2011 (Philox, doi:10.1145/2063384.2063405).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, ParamTable, ShardSpec

TILE = 256
"""Edge length of a tile in entries. Another value would change the weights for every seed."""


_DRAWS: dict[str, Callable[[np.random.Generator, list[int]], NDArray[np.float32]]] = {
    "normal": lambda bits, extent: bits.standard_normal(extent, dtype=np.float32),
    "uniform": lambda bits, extent: (bits.random(extent, dtype=np.float32) * 2 - 1) * np.float32(math.sqrt(3)),
}
"""Functions that draw random numbers with mean 0 and standard deviation 1, by kind of initialization."""

Fill = Callable[[str, Tensor], None]
"""Function that initializes a parameter, given its name and a host tensor of zeros for this rank's shard."""


def materialize(
    model: nn.Module,
    put: Callable[[Tensor], Tensor],
    fill: Fill | None,
    within: nn.Module | None = None,
    stored: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
) -> None:
    """Allocate the parameters and buffers of a model that is on the meta device; allocated parameters are skipped.

    Args:
        model: Model on the meta device. Shared parameters stay shared.
        put: Copies a host tensor to the device.
        fill: Initializes each parameter; None keeps zeros, for a later checkpoint load.
        within: Submodule to allocate; None for the whole model.
        stored: Type in which a parameter is stored; by default its own type.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in (within or model).modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            key = id(parameter)
            if key not in made:
                host = torch.zeros(parameter.shape, dtype=parameter.dtype)
                if fill is not None:
                    fill(names[key], host)
                made[key] = nn.Parameter(put(host.to(stored(parameter))), requires_grad=parameter.requires_grad)
            setattr(module, leaf, made[key])
        host_buffers: Callable[[], dict[str, Tensor]] | None = getattr(module, "host_buffers", None)
        if host_buffers is not None:
            for leaf, value in host_buffers().items():
                module.register_buffer(leaf, put(value), persistent=False)


def draw(table: ParamTable, axis: Axis, seed: int) -> Fill:
    """Fill function for `materialize` that draws each parameter according to its `ShardSpec`."""

    def fill(name: str, local: Tensor) -> None:
        draw_shard(local, name, table[name], axis, seed)

    return fill


def draw_shard(local: Tensor, name: str, spec: ShardSpec, axis: Axis, seed: int) -> None:
    """Draw this rank's shard of one parameter in place; padding is not changed."""
    for piece, view in spec.views(local, axis):
        if spec.init.kind == "ones":
            view.fill_(1.0)
            continue
        if spec.init.kind == "zeros":
            view.fill_(0.0)
            continue
        offsets = [0] * view.dim()
        offsets[spec.dim or 0] = piece.start
        _draw(view, spec.global_name(name, piece.segment), spec.global_shape(piece.segment), offsets, spec.init, seed)


def _draw(view: Tensor, name: str, shape: tuple[int, ...], offsets: list[int], init: Init, seed: int) -> None:
    """Draw the entries [offsets, offsets + view.shape) of tensor `name` with shape `shape` into a view."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    spans = [range(start // TILE, -(-(start + size) // TILE)) for start, size in zip(offsets, view.shape, strict=True)]
    for tile in itertools.product(*spans):
        origin = [index * TILE for index in tile]
        extent = [min(TILE, whole - start) for start, whole in zip(origin, shape, strict=True)]
        counter = np.array([0, 0, *([0, 0, *tile][-2:])], dtype=np.uint64)
        bits = np.random.Generator(np.random.Philox(key=key, counter=counter))
        drawn = torch.from_numpy(_DRAWS[init.kind](bits, extent)).mul_(init.std)
        into, outof = [], []
        for start, size, offset, length in zip(origin, extent, offsets, view.shape, strict=True):
            low, high = max(start, offset), min(start + size, offset + length)
            into.append(slice(low - offset, high - offset))
            outof.append(slice(low - start, high - start))
        view[tuple(into)].copy_(drawn[tuple(outof)])
