"""Shard files of a checkpoint: each rank writes one file from staged memory, and reads verified blocks of all files.

Under any layout, a rank reads the entries that its shards share with the stored shards.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index

from nxtrain.checkpoint.manifest import CODES, DTYPES, Box, CheckpointManifest, TensorEntry, file_of, header
from nxtrain.checkpoint.shards import TensorShard
from nxtrain.checkpoint.staging import Staged, in_file_order
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.atomic import naming
from nxtrain.common.io.checksummed_file import ChecksummedReader, ChecksummedWriter, FileDigest
from nxtrain.common.io.object_store import Location, open_source

PIECE_BYTES = 1 << 26
"""Most bytes of a stored tensor that are buffered before the copy to the target tensor."""

LocatedShard = tuple[str, str, tuple[int, ...], Box, int]
"""Location of a shard: key, type and shape of its tensor, its box, and its byte offset in the rank's file."""


def locate(staged: Staged) -> list[LocatedShard]:
    """List the locations of a rank's shards compactly, since the leader receives the lists of all ranks."""
    shards = in_file_order(staged.tensors)
    located: list[LocatedShard] = []
    for shard, start in zip(shards, header(shards)[1], strict=True):
        box = (shard.block.offsets, shard.block.sizes)
        located.append((shard.key, CODES[shard.dtype], shard.shape, box, start))
    return located


def join(located: Sequence[Sequence[LocatedShard]]) -> dict[str, TensorEntry]:
    """Join the shard lists of all ranks to manifest entries by key; shards of a tensor are in rank order.

    Raises:
        CheckpointError: Ranks disagree on a tensor, or the shards do not cover it.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    shards: dict[str, list[tuple[int, Box, int]]] = defaultdict(list)
    for rank, ours in enumerate(located):
        for key, dtype, shape, box, start in ours:
            first = shapes.setdefault(key, (dtype, shape))
            if first != (dtype, shape):
                raise CheckpointError(
                    f"{key}: rank {rank} saves a {dtype} tensor of shape {shape}, but a lower rank saves "
                    f"a {first[0]} tensor of shape {first[1]}"
                )
            shards[key].append((rank, box, start))
    joint = {}
    for key, parts in shards.items():
        dtype, shape = shapes[key]
        ranks, boxes, starts = zip(*parts, strict=True)
        planned = sum(math.prod(sizes) for _, sizes in boxes)
        if planned != math.prod(shape):
            raise CheckpointError(
                f"{key} {shape}: the shards of all ranks have {planned:,} of its {math.prod(shape):,} entries"
            )
        joint[key] = TensorEntry.of(dtype, shape, ranks, starts, boxes)
    return joint


def write_shards(folder: Path, rank: int, staged: Staged) -> dict[str, FileDigest]:
    """Write a rank's shards to one file, without a copy of tensors in the staged memory.

    Returns:
        Checksums of the file, by name; empty if the rank has no shards, and thus no file.
    """
    shards, memory = in_file_order(staged.tensors), staged.memory
    if not shards:
        return {}
    path = folder / file_of(rank)
    with naming(path), ChecksummedWriter(path) as writer:
        writer.write(memoryview(header(shards)[0]))
        low = high = 0  # range of `memory` with adjacent tensors that are not written yet
        for shard in shards:
            tensor = staged.tensors[shard]
            offset = tensor.data_ptr() - memory.data_ptr()
            is_within = 0 <= offset <= memory.nbytes - tensor.nbytes
            is_staged = is_within and tensor.is_contiguous() and tensor.is_cpu
            start = offset if is_staged else None
            if start != high:
                writer.write(bytes_of(memory[low:high]), stays=True)
                low = high = start or 0
            if start is None:
                writer.write(bytes_of(tensor.contiguous()))
            else:
                high += tensor.nbytes
        writer.write(bytes_of(memory[low:high]), stays=True)
        return {file_of(rank): writer.close()}


def fill_from_files(
    folders: Sequence[Location], manifest: CheckpointManifest, targets: Mapping[TensorShard, Tensor]
) -> list[DamagedError]:
    """Fill the tensors of wanted shards from files; each needed block is read once, in order, and verified.

    Blocks that are missing or damaged in the first folder are read from the other folders.

    Returns:
        Damage in a folder that was repaired from another folder.
    """
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for shard, target in targets.items():
        entry = manifest.tensors[shard.key]
        wanted = (shard.block.offsets, shard.block.sizes)
        for stored, file, start in entry.parts([wanted]):
            pieces[file] += _pieces(stored, start, DTYPES[entry.dtype], wanted, target.detach())
    damage: list[DamagedError] = []
    for file, of_file in sorted(pieces.items()):
        digest = manifest.files[file]
        copies = [partial(open_source, folder / file) for folder in folders]
        with ChecksummedReader(copies, digest) as reader:
            _fill(reader, sorted(of_file, key=lambda piece: piece.start), digest.block_bytes)
            damage += reader.damage
    return damage


def _pieces(stored: Box, start: int, dtype: torch.dtype, wanted: Box, target: Tensor) -> Iterator[_Piece]:
    """Split the entries shared by a stored and a wanted box into pieces of rows of at most `PIECE_BYTES`."""
    offsets_in_file: list[int] = []
    offsets_in_target: list[int] = []
    lengths: list[int] = []
    for begin, size, wanted_begin, wanted_size in zip(*stored, *wanted, strict=True):
        first = max(begin, wanted_begin)
        offsets_in_file.append(first - begin)
        offsets_in_target.append(first - wanted_begin)
        lengths.append(min(begin + size, wanted_begin + wanted_size) - first)
    shared = narrow_tensor_by_index(target, offsets_in_target, lengths)
    columns = stored[1][1:]
    row_bytes = math.prod(columns) * dtype.itemsize
    most_rows = max(1, PIECE_BYTES // row_bytes)
    for row in range(0, lengths[0], most_rows):
        num_rows = min(most_rows, lengths[0] - row)
        first = start + (offsets_in_file[0] + row) * row_bytes
        chosen = (offsets_in_file[1:], lengths[1:])
        yield _Piece(first, (num_rows, *columns), dtype, chosen, shared[row : row + num_rows])


@dataclass
class _Piece:
    """Adjacent rows of a stored shard, and the target tensor for their wanted columns.

    Args:
        start: Byte offset of the first row in the file.
        shape: Shape of the rows.
        dtype: Type of the stored entries.
        columns: Offsets and lengths of the wanted entries in dimensions 1 and up.
        target: Tensor to fill.
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
        """Byte offset of the end of the rows in the file."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def take(self, where: int, content: memoryview) -> None:
        """Copy the part of the rows that a block of the file contains; called for every block of the rows, in order."""
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
    """Read every needed block, and copy its bytes to the pieces; pieces are sorted by start, and may share rows."""
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
    """Return the bytes of a contiguous host tensor as a memoryview, without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # such a view is contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data
