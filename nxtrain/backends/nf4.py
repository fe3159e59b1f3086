"""Matrices in NF4 with double quantization, as bitsandbytes quantizes them, whole or in the parts that ranks hold.

A block is 64 adjacent weights, counted row by row, with codes of 4 bits. Its scale has 8 bits, and a group of 256
scales has one factor. The mean of a matrix's scales is taken off before. A matrix is quantized whole and cut
afterwards, so that no value depends on the layout.

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
"""Bytes of a block's codes."""


@dataclass(frozen=True)
class Part:
    """Blocks of one matrix that a rank holds: all of the matrix, or adjacent rows or columns.

    Args:
        shape: Rows and columns of the matrix.
        dim: Dimension along which the matrix is cut.
        start, length: First row or column that the rank holds, and their number.
    """

    shape: tuple[int, int]
    dim: int
    start: int
    length: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the rank holds."""
        return self.shape[1 - self.dim] * self.length // BLOCK

    @property
    def num_groups(self) -> int:
        """Number of groups of the whole matrix."""
        return -(-self.shape[0] * self.shape[1] // (BLOCK * NF4_GROUP))

    def blocks(self, device: torch.device) -> Tensor:
        """Indices in the whole matrix of the blocks that the rank holds: (N,)."""
        rows, columns = self.shape
        if self.dim == 0 or self.length == columns:
            first = self.start * columns // BLOCK if self.dim == 0 else 0
            return torch.arange(first, first + self.num_blocks, device=device)
        of_row = torch.arange(self.start // BLOCK, (self.start + self.length) // BLOCK, device=device)
        return (torch.arange(rows, device=device)[:, None] * (columns // BLOCK) + of_row).flatten()


@dataclass(frozen=True)
class Packing:
    """Form of a rank's matrix in memory: one tensor of codes, scales, factors of groups and means, in this order.

    The tensor's type is that of the restored matrix, so that what moves parameters moves quantized ones as well.

    Args:
        parts: Parts of whole matrices, stacked by rows.
        shape: Rows and columns of the stack.
        dtype: Type of the restored matrix.
    """

    parts: tuple[Part, ...]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed tensor."""
        return self._offsets[-1] // self.dtype.itemsize, 1

    @property
    def _offsets(self) -> tuple[int, int, int]:
        """Bytes before the scales, before the factors, and of all."""
        blocks, groups = sum(p.num_blocks for p in self.parts), sum(p.num_groups for p in self.parts)
        return nf4_offsets(BLOCK, blocks, groups, len(self.parts))

    def pack(self, wholes: Sequence[Tensor]) -> Tensor:
        """Quantize whole matrices, one per part, and pack this rank's parts of them; host tensors."""
        codes, scales, factors, means = zip(*(_quantized(whole.to(self.dtype)) for whole in wholes), strict=True)
        own = [part.blocks(whole.device) for part, whole in zip(self.parts, wholes, strict=True)]
        numbers = torch.cat([*factors, *means]).view(torch.uint8)
        kept = torch.cat([tensor[blocks].flatten() for tensor, blocks in zip((*codes, *scales), own * 2, strict=True)])
        padding = self._offsets[1] - len(kept)
        return torch.cat([F.pad(kept, (0, padding)), numbers]).view(self.dtype).view(self.packed_shape)

    def restore(self, packed: Tensor) -> Tensor:
        """Matrix of this rank, of type `dtype`, from its packed form."""
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
    """Form of a matrix that one rank holds."""
    rows, columns = shape
    return Packing((Part((rows, columns), 0, 0, rows),), (rows, columns), dtype)


def _quantized(whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (N, 32) and scales (N,) in bytes, factors (G,) and the mean of the scales (1,) in float32."""
    codes, state = _library().quantize_4bit(
        whole.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return codes.view(-1, _CODES), state.absmax, state.state2.absmax, state.offset.view(1)


@cache
def _groups(part: Part, device: torch.device) -> Tensor:
    """Groups of the blocks held: (N,) int32, which equal matrices of all layers share."""
    return (part.blocks(device) // NF4_GROUP).int()


@cache
def _table(device: torch.device) -> Tensor:
    """Values of scales in bytes: (256,) float32."""
    table: Tensor = _library().create_dynamic_map().to(device)
    return table


@cache
def _library() -> Any:
    # On some CPUs the library looks for kernels of another package that nothing here calls, and warns.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise BackendError(
            "finetune.method=qlora needs bitsandbytes, which is not installed: pip install 'nxtrain[qlora]'; "
            "or use finetune.method=lora"
        ) from error
    return functional
