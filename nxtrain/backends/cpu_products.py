"""Matrix products of 16-bit types on a CPU, by native instructions or by float32 copies of blocks.

On a CPU without native instructions, torch multiplies 16-bit matrices entry by entry, at a seventh of the speed of
float32 (torch 2.9, AVX2). A product of two bfloat16 numbers is exact in float32. Both implementations sum in float32,
and round a result once.
"""

from __future__ import annotations

import platform
from typing import Final

import torch
from torch import Tensor

BLOCK_ENTRIES = 1 << 19
"""Most entries of the float32 copy of a block: 2 MiB, which fit the CPU cache."""


def has_products(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of this type at least as fast as float32 copies of them."""
    if dtype == torch.bfloat16:
        return _BF16
    return _FP16 if dtype == torch.float16 else True


# Constants, since torch.compile cannot trace queries of CPU features.
_IS_X86: Final = platform.machine().lower() in ("x86_64", "amd64")
# On x86, oneDNN's products of bfloat16 with float32 sums run by AMX or avx512_bf16 alone.
_BF16: Final = (
    torch.cpu._is_amx_tile_supported()
    or torch.cpu._is_avx512_bf16_supported()
    or (not _IS_X86 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
)
_FP16: Final = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def dense_vector(x: Tensor) -> Tensor:
    """Copy a matrix of one row or column whose entries are not adjacent; return any other matrix.

    torch 2.9 multiplies a 16-bit matrix by a column of a wider matrix as if the entries of the column were adjacent.
    """
    is_vector = x.shape[-1] == 1 or x.numel() == x.shape[-1]
    return x.contiguous() if is_vector else x


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a (..., K) by b (K, N) in float32; outside of torch.compile, by blocks that fit the cache."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    if torch.compiler.is_compiling():
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    left = a.flatten(0, -2)
    m, k = left.shape
    n = b.shape[1]
    # Not a view: an all-reduce may overwrite the result in place, which autograd forbids for views.
    out = a.new_empty(*a.shape[:-1], n)
    flat = out.view(-1, n)
    # Blocks cut the longest dimension.
    if k >= max(m, n):
        size = _block_size(m, n)
        total = torch.zeros(m, n, dtype=dtype, device=a.device)
        for columns, rows in zip(left.split(size, 1), b.split(size), strict=True):
            torch.addmm(total, columns.to(dtype), rows.to(dtype), out=total)
        flat.copy_(total)
    elif m >= n:
        size = _block_size(k, n)
        right = b.to(dtype)
        for part, rows in zip(flat.split(size), left.split(size), strict=True):
            part.copy_(rows.to(dtype) @ right)
    else:
        size = _block_size(m, k)
        whole = left.to(dtype)
        for part, columns in zip(flat.split(size, 1), b.split(size, 1), strict=True):
            part.copy_(whole @ columns.to(dtype))
    return out


def _block_size(*others: int) -> int:
    """Length of a block along the split dimension, given the product's other dimensions."""
    return max(1, BLOCK_ENTRIES // max(1, *others))
