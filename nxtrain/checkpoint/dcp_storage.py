"""How `torch.distributed.checkpoint` writes and reads the files of a rank: plain, in order, and verified."""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nxtrain.checkpoint.manifest import CODES, Box, FileEntry, Manifest, Part, TensorEntry, file_of, header
from nxtrain.checkpoint.shards import Chunk
from nxtrain.errors import DamagedError
from nxtrain.io.checksummed_file import BlockReader, BlockWriter, Stored, verify
from nxtrain.io.object_store import Place, open_source

PIECE_BYTES = 1 << 26
"""Most bytes of a tensor that wait for being copied to where they go."""


class Joint:
    """What all ranks write, which they tell each other once: a run writes the same parts in each checkpoint.

    Attributes:
        told: This rank has told its parts.
        tensors: All of them, by key; on the coordinator, once it was told.
    """

    def __init__(self) -> None:
        self.told = False
        self.tensors: dict[str, TensorEntry] = {}


class FileWriter(StorageWriter):
    """Writes what this rank has to one file; the coordinator joins what all wrote to a manifest.

    Args:
        folder: Where; it exists.
        rank: This one, which names the file.
        memory: Bytes that stay as they are until all is written; tensors that lie in them are not copied.
        joint: Of an earlier writer of the same parts; None: there was none.

    Attributes:
        stored: The file that this rank wrote, by name; at most one.
        manifest: Of all ranks, on the coordinator when all is written.
    """

    def __init__(self, folder: Path, rank: int, memory: Tensor | None = None, joint: Joint | None = None) -> None:
        self._folder, self._name = folder, file_of(rank)
        self._memory = torch.empty(0, dtype=torch.uint8) if memory is None else memory
        self._joint = joint or Joint()
        self._items: list[WriteItem] = []
        self._header = b""
        self.stored: dict[str, Stored] = {}
        self.manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: each writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan, and tell where each part will lie, in few words: the coordinator hears it of every rank."""
        # Wide types first, so that every entry lies at a multiple of its size.
        self._items = sorted(plan.items, key=lambda item: -_part(item).dtype.itemsize)
        self._header, starts = header([_part(item) for item in self._items])
        if self._joint.told:
            return SavePlan([])
        told = [_told(item, start) for item, start in zip(self._items, starts, strict=True)]
        return SavePlan([], planner_data=told)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Join what all ranks tell, and make sure that it adds up to whole tensors."""
        if not self._joint.told:
            self._joint.tensors = _join([plan.planner_data for plan in plans])
        return [SavePlan([]) for _ in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(planner) if self._items else [])
        return done

    def _write(self, planner: SavePlanner) -> list[WriteResult]:
        with BlockWriter(self._folder / self._name) as writer:
            writer.write(memoryview(self._header))
            low = high = 0  # of the memory: adjacent tensors that are not written yet
            for item in self._items:
                tensor = planner.resolve_data(item)
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
        """Where in the memory a tensor lies in one piece, if it does."""
        offset = tensor.data_ptr() - self._memory.data_ptr()
        within = 0 <= offset <= self._memory.nbytes - tensor.nbytes
        return offset if within and tensor.is_contiguous() and tensor.is_cpu else None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """List what all ranks wrote."""
        files = {result.index.fqn: FileEntry.of(result.storage_data) for written in results for result in written}
        self.manifest = Manifest(files=dict(sorted(files.items())), tensors=self._joint.tensors)

    def verify(self) -> None:
        """Read back what this rank wrote.

        Raises:
            DamagedError: The disk holds something else.
        """
        for name, stored in self.stored.items():
            verify(self._folder / name, stored)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any."""
        return True


class FileReader(StorageReader):
    """Reads, of each file, the blocks that hold what this rank wants, each once and in order, and verifies them.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        wanted: What is to be read.
        copies: Other places of the same checkpoint, for the blocks that this one lacks or has damaged.

    Attributes:
        damage: What was wrong in one place and right in another.
    """

    def __init__(
        self, folder: Place, manifest: Manifest, wanted: Iterable[Chunk], copies: Sequence[Place] = ()
    ) -> None:
        self._places = (folder, *copies)
        self.damage: list[DamagedError] = []
        self._manifest = manifest
        boxes: dict[str, list[Box]] = defaultdict(list)
        for chunk in wanted:
            boxes[chunk.key].append((chunk.block.offsets, chunk.block.sizes))
        self._metadata = manifest.metadata(boxes)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: each reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        """What tensors there are."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing: the manifest is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Accept the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Accept the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants."""
        wanted: dict[str, list[_Piece]] = defaultdict(list)
        for item in plan.items:
            file, start = self._metadata.storage_data[item.storage_index]
            wanted[file] += self._pieces(item, start, planner)
        for file, pieces in sorted(wanted.items()):
            entry = self._manifest.files[file]
            copies = [partial(open_source, place / file) for place in self._places]
            with BlockReader(copies, entry.stored) as reader:
                _fill(reader, sorted(pieces, key=lambda piece: piece.start), entry.block_bytes)
                self.damage += reader.damage
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pieces(self, item: ReadItem, start: int, planner: LoadPlanner) -> Iterator[_Piece]:
        """Cut a read by rows into what is copied at once."""
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
        """Any."""
        return True


@dataclass
class _Piece:
    """Adjacent rows of a part, all their columns, and the tensor that some of them go to.

    Args:
        start: Of the rows in the file.
        shape: Of the rows.
        dtype: Of the entries.
        columns: Offsets and lengths of what is wanted in dimensions 1 and up.
        target: Where it goes.
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
        """The byte after the last."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def take(self, where: int, content: memoryview) -> None:
        """Take what a block of the file holds of the rows; all blocks come, in order."""
        if where <= self.start:
            fits = self.target.is_contiguous() and self.target.shape == self.shape and self.target.dtype == self.dtype
            self._rows = self.target if fits and self.target.is_cpu else torch.empty(self.shape, dtype=self.dtype)
            self._into = bytes_of(self._rows)
        low, high = max(self.start, where), min(self.stop, where + len(content))
        self._into[low - self.start : high - self.start] = content[low - where : high - where]
        if high == self.stop:
            assert self._rows is not None
            if self._rows is not self.target:
                offsets, lengths = self.columns
                self.target.copy_(narrow_tensor_by_index(self._rows, (0, *offsets), (self.shape[0], *lengths)))
            self._rows, self._into = None, memoryview(b"")


def _fill(reader: BlockReader, pieces: Sequence[_Piece], block_bytes: int) -> None:
    """Bring every block that is needed to the pieces that need it; pieces are sorted, and may share rows."""
    needed = {index for piece in pieces for index in range(piece.start // block_bytes, -(-piece.stop // block_bytes))}
    waiting, underway = deque(pieces), list[_Piece]()
    for where, content in reader.blocks(sorted(needed)):
        while waiting and waiting[0].start < where + len(content):
            underway.append(waiting.popleft())
        for piece in underway:
            piece.take(where, content)
        underway = [piece for piece in underway if piece.stop > where + len(content)]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _part(item: WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None
    box = data.chunk
    return Part(item.index.fqn, data.properties.dtype, tuple(box.offsets), tuple(box.sizes))


_Told = tuple[str, str, tuple[int, ...], Box, int]
"""Key, type and shape of a tensor; a box of it, and where in a rank's file it begins."""


def _told(item: WriteItem, start: int) -> _Told:
    data, part = item.tensor_data, _part(item)
    assert data is not None
    return part.key, CODES[part.dtype], tuple(data.size), (part.offsets, part.sizes), start


def _join(told: Sequence[Sequence[_Told]]) -> dict[str, TensorEntry]:
    """What all ranks tell, by key; each tensor's parts in the order of ranks."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    found: dict[str, list[tuple[int, Box, int]]] = defaultdict(list)
    for rank, ours in enumerate(told):
        for key, dtype, shape, box, start in ours:
            assert shapes.setdefault(key, (dtype, shape)) == (dtype, shape), f"{key}: ranks differ in type or shape"
            found[key].append((rank, box, start))
    joint = {}
    for key, parts in found.items():
        (dtype, shape), (ranks, boxes, starts) = shapes[key], zip(*parts, strict=True)
        planned = sum(math.prod(sizes) for _, sizes in boxes)
        assert planned == math.prod(shape), f"{key} {shape}: ranks hold {planned} entries"
        joint[key] = TensorEntry.of(dtype, shape, ranks, starts, boxes)
    return joint
