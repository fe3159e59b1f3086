"""Causal attention for CPUs at short sequences: blocks of queries against the keys before them, by matrix products.

torch's flash kernel reaches a tenth of a CPU's matrix speed, and less in backward (torch 2.9). This implementation
saves the probabilities of the forward pass, S^2 / 2 entries per head, which is faster while they are few.

Shapes: S sequence, B batch, N query heads, K key/value heads, R = N / K, H head dimension, G = B * K groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""Queries that are computed together; half a block per row is computed and masked."""

KEPT_BYTES = 16 << 20
"""Most bytes of probabilities that one call saves for its backward pass."""


def is_short(q: Tensor) -> bool:
    """True if the probabilities of these queries, (S, B, N, H), are few enough to be saved."""
    length, batch, heads, _ = q.shape
    return batch * heads * length * (length + BLOCK) // 2 * q.element_size() <= KEPT_BYTES


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Kernels.attention`; scores, softmax and their gradients are float32."""
    out: Tensor = _BlockedAttention.apply(q, k, v)
    return out


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_kv_heads, scale = k.shape[2], 1.0 / math.sqrt(q.shape[3])
        queries, keys, values = _grouped(q, num_kv_heads), _flat(k), _flat(v)
        keys32 = keys.float()
        out = torch.empty(q.shape, dtype=q.dtype)
        kept = []
        for rows, start, end in _blocks(queries):
            scores = torch.bmm(rows.float() * scale, keys32[:, :end].transpose(1, 2))
            ahead = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            scores.unflatten(1, (-1, end - start))[..., start:end].masked_fill_(ahead, float("-inf"))
            probabilities = torch.softmax(scores, dim=-1).to(q.dtype)
            view = _block(out, num_kv_heads, start, end)
            view.copy_(torch.bmm(probabilities, values[:, :end]).view(view.shape))
            kept.append(probabilities)
        ctx.save_for_backward(q, k, v, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, *kept = ctx.saved_tensors
        num_kv_heads, scale = k.shape[2], 1.0 / math.sqrt(q.shape[3])
        queries, keys, values = _grouped(q, num_kv_heads), _flat(k), _flat(v)
        grads, values32 = _grouped(grad, num_kv_heads), values.float()
        inner = _grouped((grad.float() * out).sum(dim=-1, keepdim=True), num_kv_heads)
        q_grad = torch.empty(q.shape, dtype=q.dtype)
        k_grad, v_grad = (torch.zeros(x.shape, dtype=torch.float32) for x in (keys, values))
        for (rows, start, end), probabilities in zip(_blocks(queries), kept, strict=True):
            out_grad = grads[:, :, start:end].flatten(1, 2)
            score_grad = torch.bmm(out_grad.float(), values32[:, :end].transpose(1, 2))
            score_grad = score_grad.sub_(inner[:, :, start:end].flatten(1, 2)).mul_(probabilities).mul_(scale)
            score_grad = score_grad.to(q.dtype)
            view = _block(q_grad, num_kv_heads, start, end)
            view.copy_(torch.bmm(score_grad, keys[:, :end]).view(view.shape))
            k_grad[:, :end].add_(torch.bmm(score_grad.transpose(1, 2), rows))
            v_grad[:, :end].add_(torch.bmm(probabilities.transpose(1, 2), out_grad))
        return q_grad, _unflat(k_grad, k), _unflat(v_grad, v)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """(S, B, N, H) to (G, R, S, H): the query heads of a key/value head together."""
    heads: Tensor = x.unflatten(2, (num_kv_heads, -1))
    return heads.permute(1, 2, 3, 0, 4).flatten(0, 1)


def _flat(x: Tensor) -> Tensor:
    """(S, B, K, H) to (G, S, H)."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    """(G, S, H) to the shape and type of `like`, (S, B, K, H)."""
    heads: Tensor = x.unflatten(0, like.shape[1:3])
    return heads.permute(2, 0, 1, 3).to(like.dtype)


def _blocks(queries: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Iterate over blocks as (G, R * rows, H), with the first position and the one after the last."""
    length = queries.shape[2]
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        yield queries[:, :, start:end].flatten(1, 2), start, end


def _block(x: Tensor, num_kv_heads: int, start: int, end: int) -> Tensor:
    """View (B, K, R, rows, H) of a block's rows in (S, B, N, H)."""
    heads: Tensor = x[start:end].unflatten(2, (num_kv_heads, -1))
    return heads.permute(1, 2, 3, 0, 4)
