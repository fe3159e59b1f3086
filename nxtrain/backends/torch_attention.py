"""Causal attention by torch's kernels, over whole sequences or within each document.

Shapes: S sequence, B batch, N query heads, K key/value heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = False) -> Tensor:
    """Causal `scaled_dot_product_attention` on (S, B, N, H) tensors; `grouped` lets torch repeat key/value heads."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if repeats > 1 and not grouped:
        k, v = (repeat_heads(x, repeats) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats > 1 and grouped)
    return out.permute(2, 0, 1, 3)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Repeat each head, (B, K, S, H) to (B, K * repeats, S, H); the copies of a head are adjacent."""
    return x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def group_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """Group query heads by key/value head: (S, B, N, H) to (B * K, N / K, S, H)."""
    heads: Tensor = x.unflatten(2, (num_kv_heads, -1))
    return heads.permute(1, 2, 3, 0, 4).flatten(0, 1)


def flatten_heads(x: Tensor) -> Tensor:
    """Merge batch and heads: (S, B, K, H) to (B * K, S, H)."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def unflatten_heads(x: Tensor, like: Tensor) -> Tensor:
    """Split merged batch and heads: (B * K, S, H) to the shape of `like`, (S, B, K, H)."""
    heads: Tensor = x.unflatten(0, like.shape[1:3])
    return heads.permute(2, 0, 1, 3)


def attention_by_document(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> Tensor:
    """Compute attention within documents by one call per document, for devices that share memory with the host.

    Args:
        attention: Causal attention over whole sequences, such as `Kernels.attention`.
        q: (S, B, N, H).
        k, v: (S, B, K, H).
        starts: (B, S) first position of each position's document.
    """
    rows = []
    for row, begins in enumerate(starts.tolist()):
        bounds = [*sorted(set(begins)), len(begins)]
        parts = []
        for begin, end in pairwise(bounds):
            document = slice(begin, end), slice(row, row + 1)
            parts.append(attention(q[document], k[document], v[document]))
        rows.append(torch.cat(parts))
    return torch.cat(rows, dim=1)
