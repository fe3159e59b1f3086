"""Storage for `torch.distributed.checkpoint`: files of a rank, written in order from staged memory and read verified.

Staged memory has the order of the file, so that the disk takes the bytes from the memory without a copy.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nxtrain.checkpoint.manifest import CODES, Box, CheckpointManifest, TensorEntry, file_of, header
from nxtrain.checkpoint.shards import Shards, TensorShard, owned, tensor_shards
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.checksummed_file import ChecksummedReader, ChecksummedWriter, FileDigest, aligned_memory
from nxtrain.common.io.object_store import Location, open_source
from nxtrain.common.sharding import Layout

PIECE_BYTES = 1 << 26
"""Most bytes of a tensor that are in memory before they are copied to their target."""


class SharedPlan:
    """Shards that all ranks write, gathered once: a run writes the same shards in each checkpoint.

    Attributes:
        is_planned: The coordinator already has this rank's shards.
        tensors: Tensors of all ranks, by key; on the coordinator, once gathered.
    """

    def __init__(self) -> None:
        self.is_planned = False
        self.tensors: dict[str, TensorEntry] = {}


class FileWriter(StorageWriter):
    """Writes this rank's shards to one file; tensors inside the staged memory are not copied.

    The coordinator lists the files of all ranks in a manifest.
    """

    def __init__(self, folder: Path, rank: int, staged: Staged) -> None:
        self._folder, self._name = folder, file_of(rank)
        self._memory, self._joint = staged.memory, staged.joint
        self._shards = in_file_order(staged.tensors)
        self._header, self._starts = header(self._shards)
        self._items: dict[MetadataIndex, WriteItem] = {}
        self.stored: dict[str, FileDigest] = {}
        self.manifest: CheckpointManifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Store the plan, and list the shards' locations compactly: the coordinator receives the lists of all ranks."""
        self._items = {item.index: item for item in plan.items}
        if self._joint.is_planned:
            return SavePlan([])
        located: list[_LocatedShard] = []
        for shard, start in zip(self._shards, self._starts, strict=True):
            box = (shard.block.offsets, shard.block.sizes)
            located.append((shard.key, CODES[shard.dtype], shard.shape, box, start))
        return SavePlan([], planner_data=located)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Join the lists of all ranks, and assert that they add up to whole tensors."""
        if not self._joint.is_planned:
            self._joint.tensors = _join([plan.planner_data for plan in plans])
        return [SavePlan([]) for _ in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        results: list[WriteResult] = []
        if self._items:
            results = self._write(planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, planner: SavePlanner) -> list[WriteResult]:
        with ChecksummedWriter(self._folder / self._name) as writer:
            writer.write(memoryview(self._header))
            low = high = 0  # range of `memory` with adjacent tensors that are not written yet
            for shard in self._shards:
                tensor = planner.resolve_data(self._items[shard.index])
                assert isinstance(tensor, Tensor)
                start = self._offset(tensor)
                if start != high:
                    writer.write(bytes_of(self._memory[low:high]), stays=True)
                    low = high = start or 0
                if start is None:
                    writer.write(bytes_of(tensor.contiguous()))
                else:
                    high += tensor.nbytes
            writer.write(bytes_of(self._memory[low:high]), stays=True)
            stored = self.stored[self._name] = writer.close()
        return [WriteResult(MetadataIndex(self._name), stored.num_bytes, stored)]

    def _offset(self, tensor: Tensor) -> int | None:
        """Offset of a tensor in `memory`; None if the tensor is elsewhere or not contiguous."""
        offset = tensor.data_ptr() - self._memory.data_ptr()
        within = 0 <= offset <= self._memory.nbytes - tensor.nbytes
        if within and tensor.is_contiguous() and tensor.is_cpu:
            return offset
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the manifest of the files of all ranks."""
        files = {result.index.fqn: result.storage_data for result in chain.from_iterable(results)}
        self.manifest = CheckpointManifest(files=dict(sorted(files.items())), tensors=self._joint.tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any id: a writer is made for one checkpoint."""
        return True


class FileReader(StorageReader):
    """Reads and verifies the blocks of files that hold this rank's shards, each block once and in order.

    Blocks that are missing or damaged in `folder` are read from its fallbacks.
    """

    def __init__(
        self,
        folder: Location,
        manifest: CheckpointManifest,
        wanted: Iterable[TensorShard],
        fallbacks: Sequence[Location] = (),
    ) -> None:
        self._folders = (folder, *fallbacks)
        self.damage: list[DamagedError] = []
        self._manifest = manifest
        boxes: dict[str, list[Box]] = defaultdict(list)
        for chunk in wanted:
            boxes[chunk.key].append((chunk.block.offsets, chunk.block.sizes))
        self._metadata = manifest.metadata(boxes)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        """Metadata of the checkpoint's tensors."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest is already read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Accept the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Accept the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the shards that this rank wants."""
        wanted: dict[str, list[_Piece]] = defaultdict(list)
        for item in plan.items:
            file, start = self._metadata.storage_data[item.storage_index]
            wanted[file] += self._pieces(item, start, planner)
        for file, pieces in sorted(wanted.items()):
            entry = self._manifest.files[file]
            copies = [partial(open_source, folder / file) for folder in self._folders]
            with ChecksummedReader(copies, entry) as reader:
                _fill(reader, sorted(pieces, key=lambda piece: piece.start), entry.block_bytes)
                self.damage += reader.damage
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pieces(self, item: ReadItem, start: int, planner: LoadPlanner) -> Iterator[_Piece]:
        """Split a read by rows into pieces of at most `PIECE_BYTES`, which are copied one at a time."""
        tensor = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        dtype = tensor.properties.dtype
        (sizes,) = (box.sizes for box in tensor.chunks if box.offsets == item.storage_index.offset)
        target = planner.resolve_tensor(item).detach()
        row_bytes = sizes[1:].numel() * dtype.itemsize
        rows = max(1, PIECE_BYTES // row_bytes)
        for row in range(0, item.lengths[0], rows):
            num_rows = min(rows, item.lengths[0] - row)
            first = start + (item.storage_offsets[0] + row) * row_bytes
            columns = (item.storage_offsets[1:], item.lengths[1:])
            yield _Piece(first, (num_rows, *sizes[1:]), dtype, columns, target[row : row + num_rows])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any id: a reader is made for one checkpoint."""
        return True


@dataclass
class _Piece:
    """Adjacent whole rows of a stored shard, and the tensor that takes the wanted columns.

    Args:
        start: Offset of the first row in the file, in bytes.
        columns: Offsets and lengths of the wanted entries in dimensions 1 and up.
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: tuple[Sequence[int], Sequence[int]]
    target: Tensor
    _rows: Tensor | None = field(default=None, init=False)
    _into: memoryview = field(init=False)

    @property
    def stop(self) -> int:
        """Offset after the last byte of the rows."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def take(self, where: int, content: memoryview) -> None:
        """Copy the bytes of the rows from a block of the file. Called with every block of the rows, in order."""
        if where <= self.start:
            fits = self.target.is_contiguous() and self.target.shape == self.shape and self.target.dtype == self.dtype
            self._rows = self.target
            if not fits or not self.target.is_cpu:
                self._rows = torch.empty(self.shape, dtype=self.dtype)
            self._into = bytes_of(self._rows)
        low, high = max(self.start, where), min(self.stop, where + len(content))
        self._into[low - self.start : high - self.start] = content[low - where : high - where]
        if high == self.stop:
            assert self._rows is not None
            if self._rows is not self.target:
                offsets, lengths = self.columns
                self.target.copy_(narrow_tensor_by_index(self._rows, (0, *offsets), (self.shape[0], *lengths)))
            self._rows, self._into = None, memoryview(b"")


def _fill(reader: ChecksummedReader, pieces: Sequence[_Piece], block_bytes: int) -> None:
    """Give every needed block to the pieces inside the block; pieces are sorted by start, and may share rows."""
    needed = set[int]()
    for piece in pieces:
        needed.update(range(piece.start // block_bytes, -(-piece.stop // block_bytes)))
    waiting, underway = deque(pieces), list[_Piece]()
    for where, content in reader.blocks(sorted(needed)):
        while waiting and waiting[0].start < where + len(content):
            underway.append(waiting.popleft())
        for piece in underway:
            piece.take(where, content)
        underway = [piece for piece in underway if piece.stop > where + len(content)]


def bytes_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def in_file_order(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Shards with wide types first, so that the offset of every entry is a multiple of its size."""
    return sorted(shards, key=lambda shard: -shard.dtype.itemsize)


_LocatedShard = tuple[str, str, tuple[int, ...], Box, int]
"""Key, type and shape of a tensor, and a shard's box and offset in bytes in the rank's file."""


def _join(located: Sequence[Sequence[_LocatedShard]]) -> dict[str, TensorEntry]:
    """Join the lists of all ranks to entries by key; each tensor's shards are in the order of ranks."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    shards: dict[str, list[tuple[int, Box, int]]] = defaultdict(list)
    for rank, ours in enumerate(located):
        for key, dtype, shape, box, start in ours:
            first = shapes.setdefault(key, (dtype, shape))
            if first != (dtype, shape):
                raise CheckpointError(f"{key}: rank {rank} has {dtype} {shape}, and a rank before it has {first}")
            shards[key].append((rank, box, start))
    joint = {}
    for key, parts in shards.items():
        dtype, shape = shapes[key]
        ranks, boxes, starts = zip(*parts, strict=True)
        planned = sum(math.prod(sizes) for _, sizes in boxes)
        if planned != math.prod(shape):
            raise CheckpointError(f"{key} {shape}: the ranks hold {planned:,} of its {math.prod(shape):,} entries")
        joint[key] = TensorEntry.of(dtype, shape, ranks, starts, boxes)
    return joint


@dataclass(frozen=True)
class Staged:
    """Host tensors of the shards that a rank writes, and the memory of all tensors; if empty, tensors are copied."""

    tensors: Mapping[TensorShard, Tensor]
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    joint: SharedPlan = field(default_factory=SharedPlan)


class Staging:
    """Host memory for the shards of a rank, reused from one checkpoint to the next."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._staged: Staged | None = None

    def fill(self, shards: Shards) -> Staged:
        """Copy the shards to the host, each local tensor in one transfer; the result is valid until the next call."""
        staged = self._staged or self.allocate(shards)
        for (kind, parameter), buffer in self._buffers.items():
            buffer.copy_(shards[kind][parameter].detach())
        return staged

    def allocate(self, shards: Shards) -> Staged:
        """Take the host memory for shards, without a copy of their content."""
        mine = self._mine(shards)
        memory = torch.frombuffer(aligned_memory(max(1, self.num_bytes(shards))), dtype=torch.uint8)
        tensors: dict[TensorShard, Tensor] = {}
        start = 0
        for chunk in mine:
            name = (chunk.kind, chunk.parameter)
            if name not in self._buffers:
                x = shards[chunk.kind][chunk.parameter]
                self._buffers[name] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
                start += x.nbytes
            tensors[chunk] = chunk.of(self._buffers[name])
        self._staged = Staged(tensors, memory)
        return self._staged

    def release(self) -> None:
        """Free the host memory; the next copy allocates it again."""
        self._staged = None
        self._buffers.clear()

    @property
    def is_allocated(self) -> bool:
        """True once the host memory is taken."""
        return self._staged is not None

    def num_bytes(self, shards: Shards) -> int:
        """Host memory that `fill` takes for shards."""
        names = {(chunk.kind, chunk.parameter) for chunk in self._mine(shards)}
        return sum(shards[kind][parameter].nbytes for kind, parameter in names)

    def refer(self, shards: Shards) -> Staged:
        """Shards without a copy. Tensors are fetched to the host at their write, and must not change until then."""

        def fetch(chunk: TensorShard) -> Tensor:
            return chunk.of(shards[chunk.kind][chunk.parameter].detach().cpu())

        return Staged(LazyTensors(self._mine(shards), fetch))

    def _mine(self, shards: Shards) -> list[TensorShard]:
        """Shards that this rank writes, in the order of its file."""
        return in_file_order(owned(tuple(tensor_shards(shards, self._layout))))


class LazyTensors(Mapping[TensorShard, Tensor]):
    """Host tensors of shards, read at access, so that one tensor at a time is in memory."""

    def __init__(self, chunks: Sequence[TensorShard], read: Callable[[TensorShard], Tensor]) -> None:
        self._chunks, self._read = dict.fromkeys(chunks), read

    def __getitem__(self, chunk: TensorShard) -> Tensor:
        return self._read(chunk)

    def __iter__(self) -> Iterator[TensorShard]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)
