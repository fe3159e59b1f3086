"""Matrix products of layers: the device's own, or float32 products of 16-bit matrices, block by block.

Products of bfloat16 entries are exact in float32. So both forms have float32 sums, and round a result once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ENTRIES = 1 << 21
"""Most entries of a block of a float32 copy, 8 MiB, so that a product finds the copy in the cache."""


def linear(x: Tensor, weight: Tensor, *, wide: bool) -> Tensor:
    """x @ weight.T: (..., I), (O, I) to (..., O).

    Args:
        x, weight: Matrices of one type.
        wide: Compute in float32; such a product has no gradient in eager mode.
    """
    return matmul(x, weight.t(), wide=True) if wide else F.linear(x, weight)


def matmul(a: Tensor, b: Tensor, *, wide: bool) -> Tensor:
    """a @ b: (..., K), (K, N) to (..., N); the arguments are those of `linear`."""
    if not wide:
        return a @ b
    dtype = torch.promote_types(a.dtype, torch.float32)
    if torch.compiler.is_compiling():
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    rows = a.flatten(0, -2)
    out = rows.new_empty(len(rows), b.shape[1])
    _fill(out, rows, b, dtype)
    return out.view(*a.shape[:-1], b.shape[1])


def _fill(out: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Write a @ b, (M, K) and (K, N), in blocks of the longest dimension."""
    (m, k), n = a.shape, b.shape[1]
    if k >= max(m, n):
        size = _block_size(m, n)
        total = out.new_zeros(m, n, dtype=dtype)
        for columns, rows in zip(a.split(size, 1), b.split(size), strict=True):
            total.addmm_(columns.to(dtype), rows.to(dtype))
        out.copy_(total)
    elif m >= n:
        size, right = _block_size(k, n), b.to(dtype)
        for part, rows in zip(out.split(size), a.split(size), strict=True):
            part.copy_(rows.to(dtype) @ right)
    else:
        size, left = _block_size(m, k), a.to(dtype)
        for part, columns in zip(out.split(size, 1), b.split(size, 1), strict=True):
            part.copy_(left @ columns.to(dtype))


def _block_size(*others: int) -> int:
    """Length of a block beside the other dimensions of the product."""
    return max(1, BLOCK_ENTRIES // max(1, *others))
