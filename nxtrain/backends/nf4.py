"""NF4 quantization with double quantization, as in bitsandbytes, of whole matrices or of a rank's shards.

A block is 64 adjacent weights in row order, with 4-bit codes and one scale. Double quantization subtracts the mean of a
matrix's scales, and stores each scale in 8 bits, with one float32 factor per group of 256 scales. A matrix is quantized
whole and sharded afterwards, so no value depends on the layout.

Shapes: N blocks, G groups.

Source: Dettmers et al. 2023 (arXiv:2305.14314) section 3; bitsandbytes' `functional.quantize_4bit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.limits import NF4_GROUP, nf4_offsets
from nxtrain.common.errors import BackendError
from nxtrain.config.finetune import BLOCK

_CODES = BLOCK // 2
"""Bytes of the 4-bit codes of one block."""


@dataclass(frozen=True)
class Part:
    """Shard of one NF4 matrix on a rank: the whole matrix, or adjacent rows or columns.

    Args:
        shape: Rows and columns of the matrix.
        dim: Dimension along which the matrix is sharded.
        start, length: First row or column of the rank, and number of rows or columns.
    """

    shape: tuple[int, int]
    dim: int
    start: int
    length: int

    @property
    def num_blocks(self) -> int:
        """Number of NF4 blocks of the rank."""
        return self.shape[1 - self.dim] * self.length // BLOCK

    @property
    def num_groups(self) -> int:
        """Number of groups of scales in the whole matrix."""
        return -(-self.shape[0] * self.shape[1] // (BLOCK * NF4_GROUP))

    def blocks(self, device: torch.device) -> Tensor:
        """Indices of the rank's NF4 blocks among the blocks of the whole matrix: (N,)."""
        rows, columns = self.shape
        if self.dim == 0 or self.length == columns:
            first = self.start * columns // BLOCK if self.dim == 0 else 0
            return torch.arange(first, first + self.num_blocks, device=device)
        of_row = torch.arange(self.start // BLOCK, (self.start + self.length) // BLOCK, device=device)
        return (torch.arange(rows, device=device)[:, None] * (columns // BLOCK) + of_row).flatten()


@dataclass(frozen=True)
class Packing:
    """Memory layout of a rank's NF4 matrix: one tensor of codes, scales, group factors and means, in this order.

    The packed tensor has the type of the restored matrix, so code that moves parameters also moves quantized
    parameters.

    Args:
        parts: Shards of whole matrices, stacked by rows.
        shape: Rows and columns of the stack.
        dtype: Type of the restored matrix.
    """

    parts: tuple[Part, ...]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed NF4 tensor."""
        return self._offsets[-1] // self.dtype.itemsize, 1

    @property
    def _offsets(self) -> tuple[int, int, int]:
        """Byte offsets in the packed tensor: of the scales, of the factors, and of the end."""
        blocks, groups = sum(p.num_blocks for p in self.parts), sum(p.num_groups for p in self.parts)
        return nf4_offsets(BLOCK, blocks, groups, len(self.parts))

    def pack(self, wholes: Sequence[Tensor]) -> Tensor:
        """Quantize whole matrices on the host, one per part, and pack this rank's shards of them."""
        codes, scales, factors, means = zip(*(_quantized(whole.to(self.dtype)) for whole in wholes), strict=True)
        own = [part.blocks(whole.device) for part, whole in zip(self.parts, wholes, strict=True)]
        numbers = torch.cat([*factors, *means]).view(torch.uint8)
        kept = torch.cat([tensor[blocks].flatten() for tensor, blocks in zip((*codes, *scales), own * 2, strict=True)])
        padding = self._offsets[1] - len(kept)
        return torch.cat([F.pad(kept, (0, padding)), numbers]).view(self.dtype).view(self.packed_shape)

    def restore(self, packed: Tensor) -> Tensor:
        """Dequantize this rank's packed matrix to type `dtype`."""
        data = packed.detach().view(-1).view(torch.uint8)
        codes_end, scales_end, _ = self._offsets
        codes, numbers = data[:codes_end], data[scales_end:].view(torch.float32)
        counts = [part.num_blocks for part in self.parts]
        scales = data[codes_end : codes_end + sum(counts)].split(counts)
        *factors, means = numbers.split([*(part.num_groups for part in self.parts), len(self.parts)])
        table, library = _table(packed.device), _library()
        wide = [
            table.index_select(0, scale.int()) * factor.index_select(0, _groups(part, packed.device)) + mean
            for part, scale, factor, mean in zip(self.parts, scales, factors, means, strict=True)
        ]
        state = library.QuantState(
            torch.cat(wide), shape=(sum(counts), BLOCK), blocksize=BLOCK, quant_type="nf4", dtype=self.dtype
        )
        restored: Tensor = library.dequantize_4bit(codes.view(-1, 1), state)
        return restored.view(self.shape)


def whole_packing(shape: tuple[int, ...], dtype: torch.dtype) -> Packing:
    """Return the packing of an unsharded matrix."""
    rows, columns = shape
    return Packing((Part((rows, columns), 0, 0, rows),), (rows, columns), dtype)


def _quantized(whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize a matrix to NF4: codes (N, 32) and scales (N,) uint8, factors (G,) and mean (1,) float32."""
    codes, state = _library().quantize_4bit(
        whole.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return codes.view(-1, _CODES), state.absmax, state.state2.absmax, state.offset.view(1)


@cache
def _groups(part: Part, device: torch.device) -> Tensor:
    """Group index of each of a shard's blocks, (N,) int32; cached, since layers have equal shards."""
    return (part.blocks(device) // NF4_GROUP).int()


@cache
def _table(device: torch.device) -> Tensor:
    """Table of the float32 values of 8-bit scales: (256,)."""
    table: Tensor = _library().create_dynamic_map().to(device)
    return table


@cache
def _library() -> Any:
    # On some CPUs bitsandbytes warns that kernels of another package are missing, which nxtrain does not call.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise BackendError(
            "finetune.method=qlora needs bitsandbytes, which is not installed: pip install 'nxtrain[qlora]'; "
            "or use finetune.method=lora"
        ) from error
    return functional
