"""What files a checkpoint is made of, and where in them each tensor lies: `manifest.json`.

Every rank writes one file in the safetensors format, whose header also tells `HuggingFaceStorageReader` of
`torch.distributed.checkpoint` the offsets of each part, so that others can read a checkpoint without nxtrain.

Source: https://huggingface.co/docs/safetensors, "Format"; torch 2.9, torch/distributed/checkpoint/_hf_utils.py.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxtrain.checkpoint.directory import MANIFEST
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.io.checksummed_file import Stored
from nxtrain.io.object_store import Place, content_of
from nxtrain.io.read_retry import damage, unsteady

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
"""Of the header, before it."""
_ALIGNMENT_BYTES = 4096
"""A sector of a disk, so that what follows the header can be written from memory that is aligned as well."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of entries in a whole tensor."""


_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def file_of(rank: int) -> str:
    """Name of what a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Part:
    """A box of entries of a whole tensor.

    Args:
        key: Of the whole tensor.
        dtype: Of its entries.
        offsets, sizes: The box.
    """

    key: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size."""
        return math.prod(self.sizes) * self.dtype.itemsize


def header(parts: Sequence[Part]) -> tuple[bytes, list[int]]:
    """The first bytes of a rank's file, and where in it each part begins: one after the other, in this order."""
    entries: dict[str, Any] = {}
    starts, end = [], 0
    for part in parts:
        assert part.key not in entries, f"two parts of {part.key} in one file"
        starts.append(end)
        end += part.num_bytes
        entries[part.key] = {"dtype": CODES[part.dtype], "shape": part.sizes, "data_offsets": (starts[-1], end)}
    saved = {part.key: {"saved_offsets": part.offsets} for part in parts}
    entries["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(saved)}
    text = json.dumps(entries).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT_BYTES)
    first = _LENGTH.pack(len(text)) + text
    return first, [len(first) + start for start in starts]


class FileEntry(BaseModel):
    """A file of a checkpoint: its length, and the XXH3 of each of its blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_bytes: int
    block_bytes: int
    xxh3: tuple[str, ...]

    @staticmethod
    def of(stored: Stored) -> FileEntry:
        """What a writer found."""
        return FileEntry(num_bytes=stored.num_bytes, block_bytes=stored.block_bytes, xxh3=stored.checksums)

    @property
    def stored(self) -> Stored:
        """What a reader holds a file to."""
        return Stored(self.num_bytes, self.block_bytes, self.xxh3)


Column = int | tuple[int, ...]
"""One number for each part of a tensor; a single one if all have the same."""


class TensorEntry(BaseModel):
    """A whole tensor, and its parts by columns, since a tensor may have thousands of them.

    Args:
        dtype: Its type, as safetensors calls it.
        shape: Its shape.
        ranks: Whose files the parts are in.
        starts: Their first bytes there.
        offsets, sizes: Their boxes, a column for each dimension.
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
        """From what is known of each part."""
        offsets, sizes = (
            tuple(_column([box[which][dim] for box in boxes]) for dim in range(len(shape))) for which in (0, 1)
        )
        return TensorEntry(
            dtype=dtype, shape=shape, ranks=tuple(ranks), starts=_column(starts), offsets=offsets, sizes=sizes
        )

    def parts(self, wanted: Sequence[Box] | None = None) -> Iterator[tuple[Box, str, int]]:
        """The box, file and first byte of each part; of those only that overlap some box, if any is given."""
        num = len(self.ranks)
        offsets, sizes = (
            np.stack([np.broadcast_to(np.asarray(column, np.int64), num) for column in columns], axis=1)
            if columns
            else np.zeros((num, 0), np.int64)
            for columns in (self.offsets, self.sizes)
        )
        found = np.full(num, wanted is None)
        for first, lengths in wanted or ():
            found |= ((offsets < np.add(first, lengths)) & (offsets + sizes > first)).all(axis=1)
        starts = np.broadcast_to(np.asarray(self.starts, np.int64), num)
        for index in np.flatnonzero(found):
            box = tuple(offsets[index].tolist()), tuple(sizes[index].tolist())
            yield box, file_of(self.ranks[index]), int(starts[index])


class Manifest(BaseModel):
    """All files and tensors of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @field_validator("files")
    @classmethod
    def _lie_in_the_folder(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        """Refuse names that lead elsewhere; a mirror would copy from there."""
        for name in files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a rank's file")
        return files

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files.values())

    def metadata(self, wanted: Mapping[str, Sequence[Box]]) -> Metadata:
        """The tensors as `torch.distributed.checkpoint` describes them; each part's storage is (file, first byte).

        Args:
            wanted: Boxes of tensors that are to be read; parts that have nothing of them are left out.
        """
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for key, tensor in self.tensors.items():
            boxes = []
            for (offsets, sizes), file, start in tensor.parts(wanted.get(key, ())):
                box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                boxes.append(box)
                places[MetadataIndex(key, box.offsets)] = (file, start)
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        return Metadata(tensors, storage_data=places)


def _column(numbers: Sequence[int]) -> Column:
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def read_manifest(path: Place) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: It is absent, lost by the disk, or no manifest.
        CheckpointError: The storage fails otherwise.
    """
    file = path / MANIFEST
    try:
        return Manifest.model_validate_json(unsteady.read(lambda: content_of(file), file))
    except OSError as error:
        found = damage(file, error)
        raise found if found is not error else CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise DamagedError(file, f"it is no manifest: {error.errors()[0]['msg']}") from error
