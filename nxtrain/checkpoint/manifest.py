"""Manifest of a checkpoint, `manifest.json`: its files, and the location of each tensor's shards in them.

Every rank writes one safetensors file. The header of the file also has the offsets of each shard in the whole tensor,
so `HuggingFaceStorageReader` of `torch.distributed.checkpoint` can read a checkpoint without nxtrain.

Source: https://huggingface.co/docs/safetensors, "Format"; torch 2.9, torch/distributed/checkpoint/_hf_utils.py.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from nxtrain.checkpoint.directory import MANIFEST
from nxtrain.checkpoint.shards import TensorShard
from nxtrain.common.errors import CheckpointError, DamagedError
from nxtrain.common.io.checksummed_file import FileDigest
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.read_retry import damage, retry_budget

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

_LENGTH = struct.Struct("<Q")
"""Encoding of the first field of a safetensors file, the length of its header in bytes."""
_ALIGNMENT_BYTES = 4096
"""Alignment of the header's end to a disk sector, so that direct I/O can write tensors after it."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a shard in the whole tensor, per dimension."""


_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def file_of(rank: int) -> str:
    """Name of the file that a rank writes to a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def header(shards: Sequence[TensorShard]) -> tuple[bytes, list[int]]:
    """Return the header of a rank's file, and the byte offset of each shard, which are adjacent in the given order."""
    by_key = {shard.key: shard for shard in shards}
    assert len(by_key) == len(shards), "two shards of one tensor in one file"
    saved = {key: {"saved_offsets": shard.block.offsets} for key, shard in by_key.items()}
    content = safetensors_header(by_key, {"DCP_SHARDING_INFO": json.dumps(saved)}, _ALIGNMENT_BYTES)
    starts, end = [], len(content)
    for shard in shards:
        starts.append(end)
        end += shard.num_bytes
    return content, starts


def safetensors_header(shards: Mapping[str, TensorShard], about: Mapping[str, str], alignment_bytes: int) -> bytes:
    """Return the header of a safetensors file with adjacent shards, equal to that of the safetensors library."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, shard in shards.items():
        start, end = end, end + shard.num_bytes
        entries[name] = {"dtype": CODES[shard.dtype], "shape": shard.block.sizes, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % alignment_bytes)
    return _LENGTH.pack(len(text)) + text


Column = int | tuple[int, ...]
"""Numbers of a tensor's shards: one number per shard, or a single number if all are equal."""


class TensorEntry(BaseModel):
    """Entry of the manifest for one tensor: its type, its shape and the locations of its shards.

    The shards are stored by columns, since a tensor may have thousands of shards.

    Args:
        dtype: Type of the tensor, as safetensors names it.
        shape: Shape of the whole tensor.
        ranks: Rank whose file holds each shard.
        starts: Byte offset of each shard in its file.
        offsets, sizes: Offsets and sizes of the shards in the whole tensor, one column per dimension.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    starts: Column
    offsets: tuple[Column, ...]
    sizes: tuple[Column, ...]

    @staticmethod
    def of(
        dtype: str, shape: tuple[int, ...], ranks: Sequence[int], starts: Sequence[int], boxes: Sequence[Box]
    ) -> TensorEntry:
        """Make an entry from the rank, the byte offset and the box of each shard."""
        offsets: list[Column] = []
        sizes: list[Column] = []
        for dim in range(len(shape)):
            offsets.append(_column([box_offsets[dim] for box_offsets, _ in boxes]))
            sizes.append(_column([box_sizes[dim] for _, box_sizes in boxes]))
        return TensorEntry(
            dtype=dtype,
            shape=shape,
            ranks=tuple(ranks),
            starts=_column(starts),
            offsets=tuple(offsets),
            sizes=tuple(sizes),
        )

    def parts(self, wanted: Sequence[Box] | None = None) -> Iterator[tuple[Box, str, int]]:
        """Iterate over shards as box, file and byte offset; with `wanted`, only shards that overlap a wanted box."""
        num = len(self.ranks)
        offsets = _matrix(self.offsets, num)
        sizes = _matrix(self.sizes, num)
        overlaps = np.full(num, wanted is None)
        for first, lengths in wanted or ():
            overlaps |= ((offsets < np.add(first, lengths)) & (offsets + sizes > first)).all(axis=1)
        starts = np.broadcast_to(np.asarray(self.starts, np.int64), num)
        for index in np.flatnonzero(overlaps):
            box = tuple(offsets[index].tolist()), tuple(sizes[index].tolist())
            yield box, file_of(self.ranks[index]), int(starts[index])


class CheckpointManifest(BaseModel):
    """Manifest of a checkpoint: checksums of its files, and entries of its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: dict[str, FileDigest]
    tensors: dict[str, TensorEntry]

    @field_validator("files")
    @classmethod
    def _refuse_other_folders(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        """Refuse file names outside of the checkpoint's folder, since a mirror would copy such files."""
        for name in files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a rank's file, such as rank-00000.safetensors")
        return files

    @property
    def num_bytes(self) -> int:
        """Size of all files of the checkpoint in bytes."""
        return sum(file.num_bytes for file in self.files.values())


def _column(numbers: Sequence[int]) -> Column:
    if len(set(numbers)) == 1:
        return numbers[0]
    return tuple(numbers)


def _matrix(columns: Sequence[Column], num_rows: int) -> np.ndarray:
    """Stack columns to a (rows, columns) array; a column with a single number is repeated."""
    if not columns:
        return np.zeros((num_rows, 0), np.int64)
    return np.stack([np.broadcast_to(np.asarray(column, np.int64), num_rows) for column in columns], axis=1)


def read_manifest(path: Location) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read.
        DamagedError: The file is damaged.
    """
    file = path / MANIFEST
    try:
        return CheckpointManifest.model_validate_json(retry_budget.read(lambda: content_of(file), file))
    except OSError as error:
        damaged = damage(file, error)
        if isinstance(damaged, DamagedError):
            raise damaged from error
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise DamagedError(file, f"it is not a valid manifest: {error.errors()[0]['msg']}") from error
