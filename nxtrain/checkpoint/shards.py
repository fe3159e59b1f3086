"""Shards of tensors in a checkpoint: their place in local tensors, and the rank that writes each shard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nxtrain.common.sharding import Layout, ShardBox
from nxtrain.common.text import listed

Shards = Mapping[str, Mapping[str, Tensor]]
"""Local tensors of a rank, by kind (weights or an optimizer state), then by parameter name."""

MODEL = "model"
"""Kind of the weights, in contrast to kinds of optimizer state."""

SLIVER = 1 / 32
"""Smallest end of a tensor that is split off as a separate shard, as a fraction of a rank's bytes."""


@dataclass(frozen=True)
class TensorShard:
    """Shard of a tensor: a box of entries, and its place in a local tensor.

    Args:
        kind: `model`, or the name of an optimizer state.
        parameter: Name of the local parameter in the model.
        name: Global name of the tensor.
        shape: Shape of the whole tensor.
        dtype: Type of the tensor.
        block: Box of the entries, in the whole tensor and in the local tensor.
        copy: Index of this rank's replica among equal replicas, 0 <= copy < copies.
        copies: Number of ranks that hold these entries.
        tied: The tensor is tied to a parameter of another pipeline stage, which writes the tensor.
    """

    kind: str
    parameter: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: ShardBox
    copy: int = 0
    copies: int = 1
    tied: bool = False

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorShard:
        """Make a shard that contains a whole weight."""
        return TensorShard(MODEL, name, name, shape, dtype, ShardBox.whole(shape))

    @property
    def key(self) -> str:
        """Key of the whole tensor in a checkpoint, such as `model/lm_head.weight`."""
        return f"{self.kind}/{self.name}"

    @property
    def num_bytes(self) -> int:
        """Size of the shard in bytes."""
        return math.prod(self.block.sizes) * self.dtype.itemsize

    def rows(self, start: int, number: int) -> TensorShard:
        """Return a range of rows of the shard, along dimension 0."""
        return replace(self, block=self.block.rows(start, number))

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the shard's entries in the local tensor."""
        return self.block.of(local)


def tensor_shards(shards: Shards, layout: Layout) -> Iterator[TensorShard]:
    """Iterate over the shards in a rank's local tensors, in the order of the tensors, without padding."""
    for kind, tensors in shards.items():
        for parameter, local in tensors.items():
            spec, replica = layout.table[parameter], layout.axes_of(parameter).replica
            for block in layout[parameter]:
                yield TensorShard(
                    kind,
                    parameter,
                    spec.global_name(parameter, block.segment),
                    spec.global_shape(block.segment),
                    local.dtype,
                    block,
                    copy=block.copy * replica.size + replica.rank,
                    copies=block.copies * replica.size,
                    tied=spec.tied_to is not None,
                )


def owned(held: Sequence[TensorShard]) -> list[TensorShard]:
    """Select the shards that a rank writes, so that replicas write each entry once and share the bytes evenly.

    Shards with the same number of replicas are concatenated, and each replica writes an equal range of their bytes. A
    shard in several ranges is split between rows, unless one end is smaller than `SLIVER` of a range.

    Ranks that share one shard share all shards with the same number of replicas, in the same order. Each rank therefore
    computes the same assignment without communication. The same holds for experts: where their replicas are other ranks
    than those of other tensors, they are fewer.
    """
    held = [chunk for chunk in held if chunk.num_bytes and not chunk.tied]
    total, before = Counter[int](), Counter[int]()
    for chunk in held:
        total[chunk.copies] += chunk.num_bytes
    mine = []
    for chunk in held:
        start = before[chunk.copies]
        before[chunk.copies] += chunk.num_bytes
        rows = _rows(chunk, start, total[chunk.copies])
        if rows:
            mine.append(chunk.rows(rows.start, len(rows)))
    return mine


def _rows(chunk: TensorShard, start: int, total: int) -> range:
    """Return the range of a shard's rows that this rank writes among its replicas.

    Args:
        start: Offset of the shard among the concatenated shards with the same number of replicas, in bytes.
        total: Size of the concatenated shards in bytes.
    """
    num_rows = chunk.block.sizes[0]
    row_bytes = chunk.num_bytes // num_rows

    def first_row(part: int) -> int:
        """First row of the range that a replica writes."""
        inside = part * total // chunk.copies - start
        sliver = SLIVER * total / chunk.copies
        if inside >= chunk.num_bytes:
            return num_rows
        if inside < sliver:
            return 0
        if inside > chunk.num_bytes - sliver:
            return num_rows
        return round(inside / row_bytes)

    return range(first_row(chunk.copy), first_row(chunk.copy + 1))


def mismatches(wanted: Mapping[str, object], present: Mapping[str, object]) -> list[str]:
    """Describe differences between wanted and present tensors, one line per kind of difference; empty if they agree.

    Args:
        wanted: Description of each wanted tensor, such as its shape, by name.
        present: Description of each present tensor, by name.
    """
    missing = [name for name in wanted if name not in present]
    extra = [name for name in present if name not in wanted]
    wrong = [
        f"{name} is {present[name]} instead of {expected}"
        for name, expected in wanted.items()
        if name in present and present[name] != expected
    ]
    lines = {"missing": missing, "unknown to the model": extra, "different": wrong}
    differences = []
    for title, names in lines.items():
        if names:
            differences.append(f"{len(names)} {title}: {listed(names)}")
    return differences
