"""How each parameter is cut over the tensor parallel ranks: the single truth for everything that touches a weight.

Initialization, gradients, norms, checkpoints, conversion and planning all derive what they need from `ShardSpec`; no
other module knows where a rank's rows begin. A fused matrix (q, k and v in one) is a stack of segments, each a tensor
of its own under its own name in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from nxtrain.mesh import Axis, Mesh

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Init:
    """How a parameter starts.

    Args:
        kind: Drawn from N(0, std^2), or filled with a constant.
        std: Standard deviation of `normal`.
    """

    kind: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02


@dataclass(frozen=True)
class Segment:
    """One global tensor inside a parameter.

    Args:
        name: Module name of the tensor when it stands alone, such as `q_proj`; empty if the parameter holds just this.
        size: Entries along the cut dimension in the whole tensor.
        replicas: Adjacent tensor parallel ranks that hold the same slice (K/V heads when tp exceeds them).
    """

    name: str
    size: int
    replicas: int = 1


@dataclass(frozen=True)
class TpSlice:
    """One run of a local shard: which entries of which global tensor a rank holds, and where.

    Args:
        segment: The global tensor.
        start: First entry in the global tensor, along the cut dimension.
        length: Real entries; may be 0 on the last ranks of a padded tensor.
        local_start: First entry in the local shard.
        local_length: Entries that the piece takes in the local shard; those past `length` are padding, always zero.
        copy: Which of the equal copies this is, 0 <= copy < copies.
        copies: Ranks of the axis that hold the same entries.
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
    """A box of entries of one global tensor, and where a rank keeps it.

    Args:
        segment: The global tensor.
        offsets, sizes: The box in the global tensor.
        local_offsets: Where it begins in the local tensor.
        copy: Which of the equal copies over the tensor parallel axis this is, 0 <= copy < copies.
        copies: Tensor parallel ranks that hold the same entries.
    """

    segment: Segment
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    copy: int
    copies: int

    @staticmethod
    def whole(shape: tuple[int, ...]) -> ShardBox:
        """All of an unfused tensor."""
        origin = (0,) * len(shape)
        return ShardBox(Segment("", shape[0]), origin, shape, origin, copy=0, copies=1)

    def rows(self, start: int, number: int) -> ShardBox:
        """Adjacent rows of the box, counted in dimension 0 from its first."""
        sizes = (number, *self.sizes[1:])
        first, local_first = self.offsets[0] + start, self.local_offsets[0] + start
        offsets, local_offsets = (first, *self.offsets[1:]), (local_first, *self.local_offsets[1:])
        return replace(self, offsets=offsets, sizes=sizes, local_offsets=local_offsets)

    def of(self, local: Tensor) -> Tensor:
        """Its view into the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local


def row_cut(num_rows: int, axis: Axis) -> tuple[int, int]:
    """The rows of dimension 0 that a rank of an axis keeps, first and number: equally many, fewer on the last ranks.

    Source: the cut of torch's `fully_shard`, which is that of `torch.chunk`.
    """
    width = -(-num_rows // axis.size)
    start = min(axis.rank * width, num_rows)
    return start, min(width, num_rows - start)


@dataclass(frozen=True)
class ShardSpec:
    """How one parameter is cut over an axis.

    Args:
        shape: Shape of the whole parameter, segments stacked along `dim`, neither padded nor replicated.
        dim: Dimension that is cut; None when every rank holds all of it.
        segments: The global tensors stacked along `dim`; one unnamed segment unless the matrix is fused.
        sequence_parallel: Each rank's gradient is a partial sum, because it saw only its slice of the sequence.
        tied_to: Name of the parameter on the first pipeline stage that this one, on the last, is a copy of.
        has_copy: There is such a copy of this one; both get the sum of their gradients.
        decay: Weight decay applies.
        init: How the parameter starts.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    segments: tuple[Segment, ...] = ()
    sequence_parallel: bool = False
    tied_to: str | None = None
    has_copy: bool = False
    decay: bool = True
    init: Init = field(default_factory=Init)

    def __post_init__(self) -> None:
        """Give an unfused parameter its one segment, and hold fused ones to their sum."""
        axis = 0 if self.dim is None else self.dim
        if not self.segments:
            object.__setattr__(self, "segments", (Segment("", self.shape[axis]),))
        assert sum(s.size for s in self.segments) == self.shape[axis], self

    @property
    def is_tied(self) -> bool:
        """True for a parameter that the first and the last pipeline stage each hold."""
        return self.has_copy or self.tied_to is not None

    def pieces(self, axis: Axis) -> tuple[TpSlice, ...]:
        """What this rank of `axis` holds, in local order; a segment that does not divide is padded at its end."""
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
        """Shape of each rank's shard, equal on all ranks."""
        last = self.pieces(axis)[-1]
        dim = self.dim or 0
        return (*self.shape[:dim], last.local_start + last.local_length, *self.shape[dim + 1 :])

    def global_shape(self, segment: Segment) -> tuple[int, ...]:
        """Shape of one segment as a tensor of its own."""
        dim = self.dim or 0
        return (*self.shape[:dim], segment.size, *self.shape[dim + 1 :])

    def global_name(self, parameter: str, segment: Segment) -> str:
        """Name of a segment in checkpoints, the same for all copies, given the parameter's own name."""
        return global_name(self.tied_to or parameter, segment)

    def blocks(self, tp: Axis, shard: Axis) -> Iterator[ShardBox]:
        """What this rank holds once its tensor parallel shard is cut by rows over `shard`; padding left out."""
        dim = self.dim or 0
        first, num_rows = row_cut(self.local_shape(tp)[0], shard)
        for piece in self.pieces(tp):
            offsets, sizes, local = [0] * len(self.shape), list(self.shape), [0] * len(self.shape)
            offsets[dim], sizes[dim], local[dim] = piece.start, piece.length, piece.local_start
            low, high = max(local[0], first), min(local[0] + sizes[0], first + num_rows)
            if low < high and piece.length:
                offsets[0] += low - local[0]
                sizes[0], local[0] = high - low, low - first
                yield ShardBox(piece.segment, tuple(offsets), tuple(sizes), tuple(local), piece.copy, piece.copies)

    def views(self, local: Tensor, axis: Axis) -> Iterator[tuple[TpSlice, Tensor]]:
        """Each piece with its view into the local shard, padding left out."""
        for piece in self.pieces(axis):
            yield piece, local.narrow(self.dim or 0, piece.local_start, piece.length)

    def shard(self, tensors: Mapping[str, Tensor], axis: Axis) -> Tensor:
        """Cut this rank's shard out of whole tensors, one per segment name; padding is zero."""
        some = tensors[self.segments[0].name]
        local = some.new_zeros(self.local_shape(axis))
        for piece, view in self.views(local, axis):
            view.copy_(tensors[piece.segment.name].narrow(self.dim or 0, piece.start, piece.length))
        return local


class ParamTable(Mapping[str, ShardSpec]):
    """The `ShardSpec` of every parameter of a model, by parameter name, in model order."""

    def __init__(self, specs: Mapping[str, ShardSpec]) -> None:
        self._specs = dict(specs)

    @classmethod
    def of(cls, model: nn.Module) -> ParamTable:
        """Collect the `specs` that the modules of a model declare for their own parameters."""
        specs = {}
        for prefix, module in model.named_modules():
            for name, spec in getattr(module, "specs", {}).items():
                specs[f"{prefix}.{name}" if prefix else name] = spec
        table = cls({name: specs[name] for name, _ in model.named_parameters()})
        for name, parameter in model.named_parameters():
            assert len(parameter.shape) == len(specs[name].shape), (name, parameter.shape, specs[name])
        return table

    def __getitem__(self, name: str) -> ShardSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def num_params(self) -> int:
        """Parameters that the table has, each counted once whatever the layout, and none that are copies."""
        return sum(_numel(spec.shape) for spec in self.values() if spec.tied_to is None)

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model as a checkpoint knows it: global name to whole shape."""
        return {
            spec.global_name(name, segment): spec.global_shape(segment)
            for name, spec in self.items()
            for segment in spec.segments
        }


class Layout(Mapping[str, tuple[ShardBox, ...]]):
    """The blocks of every parameter whose training state a rank holds: by parameter name, in model order.

    Its local tensors are the rows of the tensor parallel shards that `row_cut` gives this rank of `mesh.shard`, and
    perhaps rows of zeros after them.

    Args:
        table: How the parameters are cut over tp.
        mesh: The axes of this rank.
    """

    def __init__(self, table: ParamTable, mesh: Mesh) -> None:
        self.table, self.mesh = table, mesh
        self._blocks = {name: tuple(spec.blocks(mesh.tp, mesh.shard)) for name, spec in table.items()}

    def __getitem__(self, name: str) -> tuple[ShardBox, ...]:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def row_copies(self, name: str, num_rows: int) -> list[int]:
        """How many tensor parallel ranks hold each of the first rows of this rank's tensor; 1 for padding."""
        copies = [1] * num_rows
        for block in self[name]:
            for row in range(block.local_offsets[0], block.local_offsets[0] + block.sizes[0]):
                copies[row] = block.copies
        return copies

    def is_shared(self, name: str) -> bool:
        """True for a parameter of which several ranks of one model copy update the same entries, each for itself.

        Such entries are copies over tp (norm weights, replicated K/V heads) and tied copies over pp. Data parallel
        replicas do not count. The answer is the same on all ranks of a stage.
        """
        spec = self.table[name]
        return spec.is_tied or any(piece.copies > 1 for piece in spec.pieces(self.mesh.tp))

    def mixes_copies(self, name: str) -> bool:
        """Whether rows of a parameter differ in how many ranks hold them, on any rank."""
        return len({piece.copies for piece in self.table[name].pieces(self.mesh.tp)}) > 1


def global_name(parameter: str, segment: Segment) -> str:
    """Checkpoint name of a segment: `a.qkv_proj.weight` and segment `q_proj` give `a.q_proj.weight`."""
    if not segment.name:
        return parameter
    module, _, leaf = parameter.rpartition(".")
    parent, _, _ = module.rpartition(".")
    return ".".join(part for part in (parent, segment.name, leaf) if part)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
