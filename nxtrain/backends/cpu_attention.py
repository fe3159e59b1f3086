"""Causal attention for short sequences on CPUs: matrix products of blocks of queries with the keys before them.

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

from nxtrain.backends.cpu_products import has_products
from nxtrain.backends.limits import CPU_BLOCK, keeps_probabilities
from nxtrain.backends.torch_attention import flatten_heads, group_heads, repeat_heads, unflatten_heads

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_short(q: Tensor) -> bool:
    """True if the attention probabilities of queries (S, B, N, H) are few enough to save for backward."""
    length, batch, heads, _ = q.shape
    return keeps_probabilities(batch, heads, length, q.element_size())


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention (`Kernels.attention`) with float32 scores, softmax and gradients of both."""
    out: Tensor = _BlockedAttention.apply(q, k, v)
    return out


def wide_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's float32 flash kernel, for 16-bit inputs that this CPU cannot multiply."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if repeats > 1:
        k, v = (repeat_heads(x, repeats) for x in (k, v))
    out: Tensor = _WideFlashAttention.apply(q, k, v)
    return out.permute(2, 0, 1, 3)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_kv_heads = k.shape[2]
        scale = 1.0 / math.sqrt(q.shape[3])
        dtype = _product_type(q)
        queries = group_heads(q, num_kv_heads)
        keys32 = flatten_heads(k).float()
        values = flatten_heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        kept = []
        for rows, start, end in _blocks(queries):
            scores = torch.bmm(rows.float() * scale, keys32[:, :end].transpose(1, 2))
            ahead = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            scores.unflatten(1, (-1, end - start))[..., start:end].masked_fill_(ahead, float("-inf"))
            probabilities = torch.softmax(scores, dim=-1).to(q.dtype)
            view = _block(out, num_kv_heads, start, end)
            view.copy_(torch.bmm(probabilities.to(dtype), values[:, :end].to(dtype)).view(view.shape))
            kept.append(probabilities)
        ctx.save_for_backward(q, k, v, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, *kept = ctx.saved_tensors
        num_kv_heads = k.shape[2]
        scale = 1.0 / math.sqrt(q.shape[3])
        dtype = _product_type(q)
        queries = group_heads(q, num_kv_heads)
        keys = flatten_heads(k)
        values32 = flatten_heads(v).float()
        grads = group_heads(grad, num_kv_heads)
        inner = group_heads((grad.float() * out).sum(dim=-1, keepdim=True), num_kv_heads)
        q_grad = torch.empty(q.shape, dtype=q.dtype)
        k_grad, v_grad = (torch.zeros(x.shape, dtype=torch.float32) for x in (keys, values32))
        for (rows, start, end), probabilities in zip(_blocks(queries), kept, strict=True):
            out_grad = grads[:, :, start:end].flatten(1, 2)
            score_grad = torch.bmm(out_grad.float(), values32[:, :end].transpose(1, 2))
            score_grad = score_grad.sub_(inner[:, :, start:end].flatten(1, 2)).mul_(probabilities).mul_(scale)
            score_grad = score_grad.to(dtype)
            view = _block(q_grad, num_kv_heads, start, end)
            view.copy_(torch.bmm(score_grad, keys[:, :end].to(dtype)).view(view.shape))
            k_grad[:, :end].add_(torch.bmm(score_grad.transpose(1, 2), rows.to(dtype)))
            v_grad[:, :end].add_(torch.bmm(probabilities.to(dtype).transpose(1, 2), out_grad.to(dtype)))
        return q_grad, unflatten_heads(k_grad, k).to(k.dtype), unflatten_heads(v_grad, v).to(v.dtype)


class _WideFlashAttention(torch.autograd.Function):
    """torch's float32 flash kernel on 16-bit inputs (B, N, S, H), with 16-bit tensors saved for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide, log_sums = _FLASH(*map(_float_rows, (q, k, v)), 0.0, True)
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *saved, log_sums = ctx.saved_tensors
        grads = _FLASH_BACKWARD(*map(_float_rows, (grad, *saved)), log_sums, 0.0, True)
        q_grad, k_grad, v_grad = (x.to(grad.dtype) for x in grads)
        return q_grad, k_grad, v_grad


def _float_rows(x: Tensor) -> Tensor:
    """Copy to float32 with contiguous rows; the flash kernel ignores the stride of a row (torch 2.9)."""
    wide = x.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def _product_type(x: Tensor) -> torch.dtype:
    """Type in which this CPU multiplies matrices of the tensor's type."""
    return x.dtype if has_products(x.dtype) else torch.float32


def _blocks(queries: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Iterate over blocks of queries (G, R * rows, H), each with its first position and the position after its last."""
    length = queries.shape[2]
    for start in range(0, length, CPU_BLOCK):
        end = min(start + CPU_BLOCK, length)
        yield queries[:, :, start:end].flatten(1, 2), start, end


def _block(x: Tensor, num_kv_heads: int, start: int, end: int) -> Tensor:
    """View a block's positions of a tensor (S, B, N, H) as (B, K, R, rows, H)."""
    heads: Tensor = x[start:end].unflatten(2, (num_kv_heads, -1))
    return heads.permute(1, 2, 3, 0, 4)
