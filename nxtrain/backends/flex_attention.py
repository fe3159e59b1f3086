"""Attention to documents and windows by torch's FlexAttention, with a block mask that the device builds.

The block mask needs no device-to-host copy. For a block of queries, a block of keys is full, partial or skipped. In a
full block every query attends to every key, and no mask is applied. In a partial block a mask compares positions. The
visible keys of a query are adjacent, so the blocks of each kind follow from the first visible key of each query.

Shapes: S sequence, B batch, N query heads, K key/value heads, H head dimension, Q blocks of a row.

Source: Dong et al. 2024 (arXiv:2412.05496) for the block mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nxtrain.backends.sdpa_kernels import first_line, relative_error, wrong_numbers

BLOCK = 128
"""Number of queries, and of keys, in a block; the default of FlexAttention."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """Causal attention in which each query also has a first visible key.

    Args:
        q: (S, B, N, H).
        k, v: (S, B, K, H).
        first: (B, S) int64, first visible position of each query, at most the query's own; ascending.

    Returns:
        (S, B, N, H).
    """
    from torch.nn.attention.flex_attention import flex_attention as attend

    is_grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out: Any = attend(q, k, v, block_mask=block_mask(first), enable_gqa=is_grouped)
    return out.permute(2, 0, 1, 3)  # type: ignore[no-any-return]


def block_mask(first: Tensor) -> Any:
    """Build FlexAttention's `BlockMask` for queries that attend to the keys from `first` to their own position.

    Args:
        first: As for `flex_attention`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[batch, query])

    length = first.shape[1]
    num_blocks = -(-length // BLOCK)
    numbers = torch.arange(num_blocks, device=first.device)
    # `first` is ascending: the first query of a block has the lowest first key, and the last query the highest.
    lowest = first[:, ::BLOCK] // BLOCK
    ends = F.pad(first, (0, num_blocks * BLOCK - length), mode="replicate")[:, BLOCK - 1 :: BLOCK]
    first_full = torch.minimum((ends + BLOCK - 1) // BLOCK, numbers)
    num_full, num_before = numbers - first_full, first_full - lowest
    full = (first_full.unsqueeze(-1) + numbers).clamp(max=num_blocks - 1)
    # Partial blocks are those before the full ones, and the block of the queries themselves.
    before = lowest.unsqueeze(-1) + numbers
    partial = torch.where(numbers < num_before.unsqueeze(-1), before, numbers.unsqueeze(-1)).clamp(max=num_blocks - 1)
    counts = [(x.to(torch.int32)).unsqueeze(1) for x in (num_before + 1, num_full)]
    indices = [(x.to(torch.int32)).unsqueeze(1) for x in (partial, full)]
    return BlockMask.from_kv_blocks(
        counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def compiled() -> Attend:
    """Compile `flex_attention` with torch.compile, for each shape on first use."""
    # Static shapes: a run has one or two, and none grows from step to step.
    return torch.compile(flex_attention, dynamic=False)


def failure(attend: Attend, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Try FlexAttention forward and backward on a device; return the reason for a failure, or an empty string.

    A row of two documents has skipped, partial and full blocks. Output and gradients are compared with those of masked
    attention in float32.
    """
    length, begin = 4 * BLOCK, BLOCK + BLOCK // 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, 1, heads, head_size) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().float().requires_grad_() for x in given]
    positions = torch.arange(length, device=device)
    first = torch.where(positions < begin, 0, begin).unsqueeze(0)
    try:
        out = attend(given[0], given[1], given[2], first)
        actual = [out.detach(), *torch.autograd.grad(out, given, out.detach())]
        expected = _masked(exact[0], exact[1], exact[2], first)
        wanted = [expected.detach(), *torch.autograd.grad(expected, exact, expected.detach())]
        errors = [relative_error(x, y) for x, y in zip(actual, wanted, strict=True)]
        worst = float(torch.stack(errors).max())
    except Exception as error:  # compilers and drivers raise errors of their own
        return first_line(error)
    return wrong_numbers(worst)


def _masked(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """Attention by a mask of all scores; arguments and result are those of `flex_attention`."""
    positions = torch.arange(q.shape[0], device=q.device)
    mask = (positions <= positions.unsqueeze(1)) & (positions >= first.unsqueeze(2))
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)))
    with sdpa_kernel([SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
    return out.permute(2, 0, 1, 3)
