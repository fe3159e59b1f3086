"""Sharding of parameters over the tensor parallel ranks, for all code that reads or writes weights.

Initialization, gradients, norms, checkpoints, conversion and planning all derive their shapes and offsets from
`ShardSpec`. No other module computes the first row of a rank. A fused matrix, such as query, key and value in one, is
a stack of segments. In every checkpoint, each segment is a separate tensor with its own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from nxtrain.common.mesh import Axis, Mesh, StateAxes

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter.

    Args:
        kind: `normal` draws from N(0, std^2), `uniform` from an interval around 0; the others fill with a constant.
        std: Standard deviation of `normal` and `uniform`.
    """

    kind: Literal["normal", "uniform", "zeros", "ones"] = "normal"
    std: float = 0.02


NORMAL = Init()
"""Default initialization of a matrix."""


@dataclass(frozen=True)
class Segment:
    """One of the unsharded tensors that are stacked in a parameter, such as the query matrix in a fused projection.

    Args:
        name: Module name of the tensor in checkpoints, such as `q_proj`; empty if the parameter is unfused.
        size: Size of the whole tensor along the sharded dimension.
        replicas: Number of adjacent tensor parallel ranks that hold the same slice, as for K/V heads if tp exceeds
            them.
    """

    name: str
    size: int
    replicas: int = 1


@dataclass(frozen=True)
class TpSlice:
    """A contiguous slice of a segment that one tensor parallel rank holds, with its offset in the rank's local shard.

    Args:
        segment: The segment.
        start: First entry in the segment's global tensor, along the sharded dimension.
        length: Number of entries without padding; may be 0 on the last ranks of a padded tensor.
        local_start: First entry in the local shard.
        local_length: Number of entries in the local shard with padding. Entries past `length` are padding, always zero.
        copy: Index of this replica, 0 <= copy < copies.
        copies: Number of ranks of the axis that hold the same entries.
    """

    segment: Segment
    start: int
    length: int
    local_start: int
    local_length: int
    copy: int
    copies: int


@dataclass(frozen=True)
class ShardBox:
    """A box of entries of a segment that one rank holds, with its offsets in the global and local tensors.

    Args:
        segment: The segment.
        offsets, sizes: First entry and extent of the box in the segment's global tensor.
        local_offsets: First entries of the box in the local tensor.
        copy: Index of this replica over the tensor parallel axis, 0 <= copy < copies.
        copies: Number of tensor parallel ranks that hold the same entries.
    """

    segment: Segment
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    copy: int
    copies: int

    @staticmethod
    def whole(shape: tuple[int, ...]) -> ShardBox:
        """Box that covers a whole unfused tensor."""
        origin = (0,) * len(shape)
        return ShardBox(Segment("", shape[0]), origin, shape, origin, copy=0, copies=1)

    def rows(self, start: int, number: int) -> ShardBox:
        """Part of the box: `number` adjacent rows of dimension 0, counted from the box's first row."""
        sizes = (number, *self.sizes[1:])
        first, local_first = self.offsets[0] + start, self.local_offsets[0] + start
        offsets, local_offsets = (first, *self.offsets[1:]), (local_first, *self.local_offsets[1:])
        return replace(self, offsets=offsets, sizes=sizes, local_offsets=local_offsets)

    def of(self, local: Tensor) -> Tensor:
        """View of the box in a rank's local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local


def row_cut(num_rows: int, axis: Axis) -> tuple[int, int]:
    """First row and number of rows of this rank if `num_rows` rows of dimension 0 are divided over an axis.

    Shares are equal, but smaller on the last ranks.

    Source: torch's `fully_shard`, which divides rows like `torch.chunk`.
    """
    width = -(-num_rows // axis.size)
    start = min(axis.rank * width, num_rows)
    return start, min(width, num_rows - start)


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of one parameter over the tensor parallel axis, with its names in checkpoints.

    Args:
        shape: Shape of the whole parameter with segments stacked along `dim`, without padding and replicas.
        dim: Sharded dimension; None if every rank holds the whole parameter.
        segments: Global tensors stacked along `dim`; one unnamed segment unless the matrix is fused.
        partial_gradient: Each rank's gradient of a replicated parameter is a partial sum, over its part of the sequence
            or its heads.
        tied_to: Name of the parameter on the first pipeline stage of which this parameter, on the last stage, is a
            copy.
        has_copy: The last pipeline stage has a copy of this parameter; both get the sum of their gradients.
        expert: The parameter belongs to the experts of this rank. Other expert parallel ranks have other segments in
            its place.
        decay: Weight decay applies.
        init: Initial values.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    segments: tuple[Segment, ...] = ()
    partial_gradient: bool = False
    tied_to: str | None = None
    has_copy: bool = False
    expert: bool = False
    decay: bool = True
    init: Init = field(default_factory=Init)

    def __post_init__(self) -> None:
        """Give an unfused parameter its single segment, and check that the segments add up to the shape."""
        axis = 0 if self.dim is None else self.dim
        if not self.segments:
            object.__setattr__(self, "segments", (Segment("", self.shape[axis]),))
        assert sum(s.size for s in self.segments) == self.shape[axis], self

    @staticmethod
    def column(in_features: int, segments: tuple[Segment, ...], init: Init = NORMAL) -> ShardSpec:
        """Spec of a column-parallel weight, whose outputs are sharded: (sum of the segments, in_features)."""
        rows = sum(segment.size for segment in segments)
        return ShardSpec((rows, in_features), dim=0, segments=segments, init=init)

    @staticmethod
    def row(in_features: int, out_features: int, init: Init = NORMAL) -> ShardSpec:
        """Spec of a row-parallel weight, whose inputs are sharded: (out_features, in_features)."""
        return ShardSpec((out_features, in_features), dim=1, init=init)

    @staticmethod
    def vocab(
        vocab_size: int,
        hidden_size: int,
        init: Init = NORMAL,
        tied_to: str | None = None,
    ) -> ShardSpec:
        """Spec of the embedding or the output projection, with sharded vocabulary rows: (vocab_size, hidden_size)."""
        return ShardSpec((vocab_size, hidden_size), dim=0, tied_to=tied_to, init=init)

    @property
    def is_tied(self) -> bool:
        """True for a parameter of which both the first and the last pipeline stage hold a copy."""
        return self.has_copy or self.tied_to is not None

    def of_bias(self) -> ShardSpec:
        """Spec of the bias of this column-parallel weight, without weight decay."""
        assert self.dim == 0, self
        return ShardSpec(self.shape[:1], dim=0, segments=self.segments, decay=False, init=Init("zeros"))

    def of_rank(self, ep: Axis) -> ShardSpec:
        """Spec of the experts that this rank of an expert parallel axis holds, from the spec of all experts."""
        if not self.expert or ep.size == 1:
            return self
        share = len(self.segments) // ep.size
        own = self.segments[ep.rank * share : (ep.rank + 1) * share]
        dim, size = self.dim or 0, sum(segment.size for segment in own)
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]), segments=own)

    def pieces(self, axis: Axis) -> tuple[TpSlice, ...]:
        """Slices of the segments that this rank of `axis` holds, in local order; uneven segments are padded."""
        pieces, local_start = [], 0
        for segment in self.segments:
            copies = axis.size if self.dim is None else segment.replicas
            width = -(-segment.size * copies // axis.size)
            start = min(axis.rank // copies * width, segment.size)
            length = min(width, segment.size - start)
            pieces.append(TpSlice(segment, start, length, local_start, width, axis.rank % copies, copies))
            local_start += width
        return tuple(pieces)

    def local_shape(self, axis: Axis) -> tuple[int, ...]:
        """Shape of a rank's shard, equal on all ranks."""
        last = self.pieces(axis)[-1]
        dim = self.dim or 0
        return (*self.shape[:dim], last.local_start + last.local_length, *self.shape[dim + 1 :])

    def global_shape(self, segment: Segment) -> tuple[int, ...]:
        """Shape of one segment as a separate, unsharded tensor."""
        dim = self.dim or 0
        return (*self.shape[:dim], segment.size, *self.shape[dim + 1 :])

    def global_name(self, parameter: str, segment: Segment) -> str:
        """Checkpoint name of a segment, given the parameter's name in the model; tied copies share one name."""
        return global_name(self.tied_to or parameter, segment)

    def blocks(self, tp: Axis, shard: Axis) -> Iterator[ShardBox]:
        """Boxes that this rank holds: its tensor parallel shard, divided by rows over `shard`, without padding."""
        dim = self.dim or 0
        first, num_rows = row_cut(self.local_shape(tp)[0], shard)
        for piece in self.pieces(tp):
            offsets = [0] * len(self.shape)
            sizes = list(self.shape)
            local = [0] * len(self.shape)
            offsets[dim] = piece.start
            sizes[dim] = piece.length
            local[dim] = piece.local_start
            low = max(local[0], first)
            high = min(local[0] + sizes[0], first + num_rows)
            if low < high and piece.length:
                offsets[0] += low - local[0]
                sizes[0] = high - low
                local[0] = low - first
                yield ShardBox(piece.segment, tuple(offsets), tuple(sizes), tuple(local), piece.copy, piece.copies)

    def views(self, local: Tensor, axis: Axis) -> Iterator[tuple[TpSlice, Tensor]]:
        """Slices that this rank holds, each with its view of the local shard, without padding."""
        for piece in self.pieces(axis):
            yield piece, local.narrow(self.dim or 0, piece.local_start, piece.length)

    def has_whole_runs(self, axis: Axis, length: int) -> bool:
        """True if every rank's slices of a matrix are whole runs of `length` adjacent entries in row-major order."""
        rows, columns = self.shape
        for segment in self.segments:
            width, rest = divmod(segment.size * segment.replicas, axis.size)
            adjacent = width
            if self.dim == 0:
                adjacent = width * columns
            elif width >= columns:
                adjacent = rows * columns
            if rest or adjacent % length:
                return False
        return True

    def shard(self, tensors: Mapping[str, Tensor], axis: Axis) -> Tensor:
        """Create this rank's shard from whole tensors, given by segment name; padding is zero."""
        some = tensors[self.segments[0].name]
        local = some.new_zeros(self.local_shape(axis))
        for piece, view in self.views(local, axis):
            view.copy_(tensors[piece.segment.name].narrow(self.dim or 0, piece.start, piece.length))
        return local


class ParamTable(dict[str, ShardSpec]):
    """Shard specs of all parameters of a model, by parameter name, in model order."""

    @classmethod
    def of(cls, model: nn.Module) -> ParamTable:
        """Collect the shard specs that the modules of a model declare for their own parameters."""
        specs = {}
        for prefix, module in model.named_modules():
            for name, spec in getattr(module, "specs", {}).items():
                specs[f"{prefix}.{name}" if prefix else name] = spec
        table = cls({name: specs[name] for name, _ in model.named_parameters()})
        for name, parameter in model.named_parameters():
            assert len(parameter.shape) == len(specs[name].shape), (name, parameter.shape, specs[name])
        return table

    def of_trained(self, model: nn.Module) -> ParamTable:
        """Shard specs of the parameters that require gradients, without frozen parameters."""
        return ParamTable({name: self[name] for name, p in model.named_parameters() if p.requires_grad})

    def num_params(self) -> int:
        """Number of entries of all unsharded parameters; tied copies are not counted."""
        return sum(math.prod(spec.shape) for spec in self.values() if spec.tied_to is None)

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name and unsharded shape of every tensor of the model."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, spec in self.items():
            for segment in spec.segments:
                shapes[spec.global_name(name, segment)] = spec.global_shape(segment)
        return shapes


class Layout(dict[str, tuple[ShardBox, ...]]):
    """Boxes of every parameter whose training state this rank holds, by parameter name, in model order.

    A local tensor has rows of the tensor parallel shard, selected by `row_cut` over the shard axis. Rows of zeros may
    follow as padding.
    """

    def __init__(self, table: ParamTable, mesh: Mesh) -> None:
        self.table, self.mesh = table, mesh
        super().__init__((name, tuple(spec.blocks(mesh.tp, self.axes_of(name).shard))) for name, spec in table.items())

    def axes_of(self, name: str) -> StateAxes:
        """Axes of the ranks that hold the training state of a parameter."""
        return self.mesh.experts if self.table[name].expert else self.mesh.dense

    def num_holders(self, name: str) -> int:
        """Number of ranks of `mesh.state` that hold the same entries, apart from replicas over tp and tied stages."""
        holds_all = self.mesh.shard_size == 1 and not self.table[name].expert
        return self.mesh.ep_size if holds_all else 1

    def row_copies(self, name: str, num_rows: int) -> list[int]:
        """Number of tensor parallel ranks that hold each of the first `num_rows` local rows; 1 for padding."""
        copies = [1] * num_rows
        for block in self[name]:
            for row in range(block.local_offsets[0], block.local_offsets[0] + block.sizes[0]):
                copies[row] = block.copies
        return copies

    def is_shared(self, name: str) -> bool:
        """True if several ranks of one model replica update the same entries of a parameter independently.

        Such entries are replicas over tp (norm weights, replicated K/V heads) and tied copies over pp. Data parallel
        replicas do not count. The result is equal on all ranks of a stage.
        """
        spec = self.table[name]
        return spec.is_tied or any(piece.copies > 1 for piece in spec.pieces(self.mesh.tp))


def global_name(parameter: str, segment: Segment) -> str:
    """Checkpoint name of a segment: `a.qkv_proj.weight` and segment `q_proj` give `a.q_proj.weight`.

    The name of a segment may have several parts: `a.experts.down_proj.weight` and `3.down_proj` give
    `a.experts.3.down_proj.weight`.
    """
    if not segment.name:
        return parameter
    module, _, leaf = parameter.rpartition(".")
    parent, _, _ = module.rpartition(".")
    return ".".join(part for part in (parent, segment.name, leaf) if part)
