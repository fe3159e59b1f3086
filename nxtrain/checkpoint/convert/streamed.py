"""Streamed writing of safetensors files: memory holds a batch of rows, never the whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxtrain.checkpoint.manifest import safetensors_header
from nxtrain.checkpoint.shard_files import bytes_of
from nxtrain.checkpoint.shards import TensorShard

BATCH_BYTES = 192 << 20
"""Most bytes of a batch of rows in memory, unless a single row is larger."""

_ALIGNMENT_BYTES = 8


def write_streamed(
    file: Path, tensors: Sequence[TensorShard], read: Callable[[Mapping[TensorShard, Tensor]], None]
) -> None:
    """Write a safetensors file, equal byte for byte to `safetensors.torch.save_file` of the same tensors.

    All batches of rows share one buffer, since the allocator could keep the freed memory of earlier batches.

    Args:
        file: File to write.
        tensors: Unsharded tensors of the file.
        read: Function that fills host tensors with rows.
    """
    ordered = sorted(tensors, key=lambda chunk: (-chunk.dtype.itemsize, chunk.name))
    parts = list(batches(ordered))
    buffer = torch.empty(max(map(_num_bytes, parts), default=0), dtype=torch.uint8)
    with file.open("wb") as out:
        out.write(safetensors_header({chunk.name: chunk for chunk in ordered}, {}, _ALIGNMENT_BYTES))
        for batch in parts:
            # Adjacent views of the buffer; wide types come first, so that each view is aligned.
            views: dict[TensorShard, Tensor] = {}
            end = 0
            for chunk in batch:
                start, end = end, end + chunk.num_bytes
                views[chunk] = buffer[start:end].view(chunk.dtype).view(chunk.block.sizes)
            read(views)
            out.write(bytes_of(buffer[:end]))


def _num_bytes(batch: Sequence[TensorShard]) -> int:
    return sum(chunk.num_bytes for chunk in batch)


def batches(tensors: Sequence[TensorShard]) -> Iterator[list[TensorShard]]:
    """Split tensors into batches of adjacent rows, of at most `BATCH_BYTES` each."""
    batch: list[TensorShard] = []
    free = BATCH_BYTES
    for chunk in tensors:
        num_rows = chunk.block.sizes[0]
        start = 0
        while start < num_rows:
            row_bytes = chunk.num_bytes // num_rows
            fitting = num_rows
            if row_bytes:
                fitting = free // row_bytes
            fewest = int(not batch)
            taken = min(num_rows - start, max(fitting, fewest))
            if taken:
                batch.append(chunk.rows(start, taken))
                free -= taken * row_bytes
                start += taken
            if start < num_rows:
                yield batch
                batch, free = [], BATCH_BYTES
    if batch:
        yield batch
