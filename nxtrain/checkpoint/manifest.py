"""What files a checkpoint is made of, and where in them each tensor lies: `manifest.json`.

Every rank writes one file in the safetensors format, whose header also tells `HuggingFaceStorageReader` of
`torch.distributed.checkpoint` the offsets of each part, so that others can read a checkpoint without nxtrain.

Source: https://huggingface.co/docs/safetensors, "Format"; torch 2.9, torch/distributed/checkpoint/_hf_utils.py.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxtrain.checkpoint.blocks import Stored
from nxtrain.checkpoint.layout import MANIFEST
from nxtrain.checkpoint.places import Place
from nxtrain.errors import DamagedError

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


class TensorEntry(BaseModel):
    """A whole tensor: its type, its shape, and its parts as (offsets, sizes, file, first byte)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], str, int], ...]


class Manifest(BaseModel):
    """All files and tensors of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files.values())

    def metadata(self) -> Metadata:
        """The tensors as `torch.distributed.checkpoint` describes them; each part's storage is (file, first byte)."""
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for key, tensor in self.tensors.items():
            boxes = []
            for offsets, sizes, file, start in tensor.parts:
                box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                boxes.append(box)
                places[MetadataIndex(key, box.offsets)] = (file, start)
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        return Metadata(tensors, storage_data=places)


def read_manifest(path: Place) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: It is absent, or no manifest.
    """
    file = path / MANIFEST
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DamagedError(file, f"cannot read it: {error.strerror}") from error
    except ValidationError as error:
        raise DamagedError(file, f"it is no manifest: {error.errors()[0]['msg']}") from error
