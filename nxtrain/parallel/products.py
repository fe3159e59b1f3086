"""Matrix products of layers: the device's own, or float32 products of 16-bit matrices, block by block.

Products of bfloat16 entries are exact in float32. So both forms have float32 sums, and round a result once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ENTRIES = 1 << 19
"""Most entries of a block of a float32 copy, 2 MiB, so that a product finds the copy in the cache."""


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
    if torch.compiler.is_compiling():
        dtype = _wide(a)
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    return _by_blocks(a, b)


def _by_blocks(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (..., K) and (K, N), in blocks of the longest dimension."""
    dtype, left, n = _wide(a), a.flatten(0, -2), b.shape[1]
    # No view of a matrix: a sum over the ranks may overwrite the result, and autograd allows that of no view.
    out = a.new_empty(*a.shape[:-1], n)
    flat, (m, k) = out.view(-1, n), left.shape
    if k >= max(m, n):
        size = _block_size(m, n)
        total = torch.zeros(m, n, dtype=dtype, device=a.device)
        for columns, rows in zip(left.split(size, 1), b.split(size), strict=True):
            torch.addmm(total, columns.to(dtype), rows.to(dtype), out=total)
        flat.copy_(total)
    elif m >= n:
        size, right = _block_size(k, n), b.to(dtype)
        for part, rows in zip(flat.split(size), left.split(size), strict=True):
            part.copy_(rows.to(dtype) @ right)
    else:
        size, whole = _block_size(m, k), left.to(dtype)
        for part, columns in zip(flat.split(size, 1), b.split(size, 1), strict=True):
            part.copy_(whole @ columns.to(dtype))
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _block_size(*others: int) -> int:
    """Length of a block next to the other dimensions of the product."""
    return max(1, BLOCK_ENTRIES // max(1, *others))
