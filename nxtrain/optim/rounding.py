"""Keys of stochastic rounding: random bits that depend on the seed and on an entry's position in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from nxtrain.backends.rounding import mix_
from nxtrain.common.kernels import RoundingKey
from nxtrain.common.sharding import Layout


def rounding_keys(
    layout: Layout, shards: Mapping[str, Tensor], kind: str, seed: int, put: Callable[[Tensor], Tensor]
) -> dict[str, RoundingKey]:
    """Rounding keys of all parameters whose state a rank holds, equal on all ranks that hold the same entries.

    Args:
        layout: The entries that this rank holds.
        shards: Tensors in the local shapes.
        kind: Kind of rounded state, such as `param`. Each kind gets independent bits.
        seed: Seed of the run.
        put: Copies a host tensor to the device.
    """
    return {name: _key(layout, name, shards[name].shape, f"{seed}/{kind}", put) for name in layout}


def _key(layout: Layout, name: str, shape: torch.Size, stream: str, put: Callable[[Tensor], Tensor]) -> RoundingKey:
    rows = torch.zeros(shape[0], dtype=torch.int32)
    spec, first = layout.table[name], 0
    if spec.dim == 1 and spec.segments[0].name:  # of several tensors, a rank may have one
        return _key_of_columns(layout, name, shape, stream, put)
    for block in layout[name]:
        start, number = block.local_offsets[0], block.sizes[0]
        label = f"{stream}/{spec.global_name(name, block.segment)}"
        rows[start : start + number] = _hashes(block.offsets[0], number, label)
        if len(shape) > 1:
            first = block.offsets[1] * shape[2:].numel()
    numbers = torch.arange(first, first + shape[1:].numel(), dtype=torch.int32)
    columns = mix_(numbers // 2)
    odd = numbers % 2 == 1
    begins_odd = first % 2 == 1
    pairs = torch.cat([columns[:1], columns[1::2]]) if begins_odd else columns[::2]
    shared = layout.is_shared(name)
    return RoundingKey(put(rows | 1), put(pairs.contiguous()), put(columns), put(odd), begins_odd, shared)


def _key_of_columns(
    layout: Layout, name: str, shape: torch.Size, stream: str, put: Callable[[Tensor], Tensor]
) -> RoundingKey:
    """Rounding key of a matrix with columns of several tensors side by side; column keys include tensor names."""
    rows, columns = (torch.zeros(size, dtype=torch.int32) for size in shape)
    spec = layout.table[name]
    for block in layout[name]:
        (start, left), (number, width) = block.local_offsets, block.sizes
        rows[start : start + number] = _hashes(block.offsets[0], number, f"{stream}/{name}")
        label = f"{stream}/{spec.global_name(name, block.segment)}"
        columns[left : left + width] = _hashes(block.offsets[1], width, label)
    odd = torch.zeros(shape[1], dtype=torch.bool)
    shared, columns = layout.is_shared(name), put(columns)
    return RoundingKey(put(rows | 1), columns, columns, put(odd), begins_odd=False, shared=shared, alone=True)


def _hashes(first: int, number: int, label: str) -> Tensor:
    """Hashes of adjacent rows or columns of a tensor: (number,) int32."""
    numbers = torch.arange(first, first + number, dtype=torch.int32)
    digest = blake2b(label.encode(), digest_size=4).digest()
    return mix_(mix_(numbers) ^ int.from_bytes(digest, "little", signed=True))
