"""Which part of which whole tensor lies where in a rank's local tensors, and which rank writes it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from nxtrain.sharding import Block, Layout

Shards = Mapping[str, Mapping[str, Tensor]]
"""Local tensors of a rank: kind, then the parameter's name in the model."""

MODEL = "model"
"""The kind of the weights."""

SLIVER = 1 / 32
"""Of what a rank writes: an end of a tensor that is less is no part of its own."""


@dataclass(frozen=True)
class Chunk:
    """A box of entries of one whole tensor, and its place in a local one.

    Args:
        kind: `model`, or the name of an optimizer state.
        parameter: The local tensor's name in the model.
        name: Global name of the whole tensor.
        shape: Shape of the whole tensor.
        dtype: Type of its entries.
        block: The entries in the whole tensor and in the local one.
        copy: Which of the equal copies this rank holds, 0 <= copy < copies.
        copies: Ranks that hold these entries.
        tied: It belongs to a parameter of another stage, which writes it.
    """

    kind: str
    parameter: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Block
    copy: int = 0
    copies: int = 1
    tied: bool = False

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk:
        """All of a weight."""
        return Chunk(MODEL, name, name, shape, dtype, Block.whole(shape))

    @property
    def key(self) -> str:
        """Key of the whole tensor in the checkpoint."""
        return f"{self.kind}/{self.name}"

    @property
    def num_bytes(self) -> int:
        """Size."""
        return math.prod(self.block.sizes) * self.dtype.itemsize

    @property
    def box(self) -> ChunkStorageMetadata:
        """Offsets and sizes in the whole tensor."""
        return ChunkStorageMetadata(torch.Size(self.block.offsets), torch.Size(self.block.sizes))

    @property
    def index(self) -> MetadataIndex:
        """How `torch.distributed.checkpoint` refers to it."""
        return MetadataIndex(self.key, self.box.offsets)

    def rows(self, start: int, number: int) -> Chunk:
        """Adjacent rows of it, counted in dimension 0."""
        return replace(self, block=self.block.rows(start, number))

    def of(self, local: Tensor) -> Tensor:
        """Its view into the local tensor."""
        return self.block.of(local)


def chunks(shards: Shards, cut: Layout) -> Iterator[Chunk]:
    """Every chunk in a rank's local tensors, in their order; padding is no part of any."""
    replica = cut.mesh.replica
    for kind, tensors in shards.items():
        for parameter, local in tensors.items():
            spec = cut.table[parameter]
            for block in cut[parameter]:
                yield Chunk(
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


def owned(held: Sequence[Chunk]) -> list[Chunk]:
    """Those of a rank's chunks that it writes: of equal copies one rank writes, and they share the bytes evenly.

    Chunks with as many copies lie end to end, and each copy's writer has an equal stretch of their bytes. A chunk that
    reaches into several stretches is cut between rows, unless the end cut off is no `SLIVER` of a stretch.

    Ranks that hold copies of a chunk hold copies of all chunks with as many copies, in the same order. So each can deal
    them out by itself and come to the same result.
    """
    held = [chunk for chunk in held if not chunk.tied]
    total, before = Counter[int](), Counter[int]()
    for chunk in held:
        total[chunk.copies] += chunk.num_bytes
    mine = []
    for chunk in held:
        start = before[chunk.copies]
        before[chunk.copies] += chunk.num_bytes
        if not chunk.num_bytes:
            mine += [chunk] * (chunk.copy == 0)
        elif rows := _rows(chunk, start, total[chunk.copies]):
            mine.append(chunk.rows(rows.start, len(rows)))
    return mine


def _rows(chunk: Chunk, start: int, total: int) -> range:
    """The rows of a chunk that its copy's writer has.

    Args:
        chunk: It.
        start: Its first byte among all that the writers of as many copies share.
        total: Number of those bytes.
    """
    num_rows = chunk.block.sizes[0]
    row_bytes = chunk.num_bytes // num_rows

    def cut(stretch: int) -> int:
        """The first row that stretches from this one on have."""
        inside = stretch * total // chunk.copies - start
        sliver = SLIVER * total / chunk.copies
        if inside >= chunk.num_bytes:
            return num_rows
        if inside < sliver:
            return 0
        return num_rows if inside > chunk.num_bytes - sliver else round(inside / row_bytes)

    return range(cut(chunk.copy), cut(chunk.copy + 1))
