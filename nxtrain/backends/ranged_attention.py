"""Attention to ranges of keys by matrix products, block by block, with memory linear in the sequence.

A block of queries meets all keys that any of its queries may see. Only sums of the weights are saved; the backward pass
computes the weights again.

Shapes: Q queries, K keys, B batch, N query heads, M key/value heads, R = N / M, G = B * M groups, H head dimension.

Source: Dao et al. 2022 (arXiv:2205.14135) for the sums that are saved, and for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nxtrain.backends.limits import block_rows
from nxtrain.backends.torch_attention import flatten_heads, group_heads, unflatten_heads
from nxtrain.common.kernels import Kernels, KeyRanges, Pieces


class _Span(NamedTuple):
    """A block: its first query and the one after its last, and those of the keys that it may see."""

    start: int
    end: int
    low: int
    high: int


class RangedAttention(torch.autograd.Function):
    """Attention to ranges of keys, (Q, B, N, H), (K, B, M, H) twice to (Q, B, N, H), by the kernels of a device."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, kernels: Kernels) -> Tensor:
        wide, log_sums = kernels.attend(q, k, v, ranges)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.ranges, ctx.kernels = ranges, kernels
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        grads = ctx.kernels.attend_backward(grad, q, k, v, out, log_sums, ctx.ranges)
        q_grad, k_grad, v_grad = (x.to(q.dtype) for x in grads)
        return q_grad, k_grad, v_grad, None, None


@dataclass(frozen=True)
class Blocks:
    """Division of an attention into blocks.

    Args:
        looks: The host reads the ranges at no cost, so that a block leaves out the keys that it does not see.
        score_type: Type in which queries are multiplied by keys; None: that of the queries.
    """

    looks: bool = False
    score_type: torch.dtype | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        num_kv_heads, product_type = k.shape[2], self.score_type or q.dtype
        queries = group_heads(q, num_kv_heads)
        keys, values = (flatten_heads(x).to(product_type) for x in (k, v))
        outs, sums = [], []
        for span in self._spans(queries, keys, ranges):
            start, end, low, high = span
            rows = queries[:, :, start:end].flatten(1, 2).to(product_type)
            if low == high:
                outs.append(torch.zeros_like(queries[:, :, start:end], dtype=torch.float32))
                sums.append(outs[-1].new_full(outs[-1].shape[:3], float("-inf")))
                continue
            scores = _scores(rows, keys[:, low:high], ranges, span)
            peak = scores.amax(dim=-1, keepdim=True).clamp(min=_LOWEST)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            out = torch.bmm(weights.to(product_type), values[:, low:high]).float() / total.clamp(min=_TINY)
            outs.append(out.unflatten(1, (-1, end - start)))
            sums.append((total.log() + peak).squeeze(-1).unflatten(1, (-1, end - start)))
            del scores, weights  # else they stay while those of the next block are made
        return _ungrouped(torch.cat(outs, dim=2), q), torch.cat(sums, dim=2).reshape(q.shape[1], q.shape[2], -1)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        num_kv_heads, product_type = k.shape[2], self.score_type or q.dtype
        scale = 1.0 / math.sqrt(q.shape[3])
        queries = group_heads(q, num_kv_heads)
        keys, values = (flatten_heads(x).to(product_type) for x in (k, v))
        grads = group_heads(grad, num_kv_heads)
        inner = group_heads((grad.float() * out).sum(dim=-1, keepdim=True), num_kv_heads)
        sums = log_sums.reshape(*queries.shape[:3], 1)
        k_grad = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
        v_grad = torch.zeros_like(k_grad)
        q_grads = []
        for span in self._spans(queries, keys, ranges):
            start, end, low, high = span
            rows = queries[:, :, start:end].flatten(1, 2).to(product_type)
            if low == high:
                q_grads.append(torch.zeros_like(queries[:, :, start:end], dtype=torch.float32))
                continue
            scores = _scores(rows, keys[:, low:high], ranges, span)
            # A query that sees no key at all has a sum of -inf, and no weights.
            weights = scores.sub_(sums[:, :, start:end].flatten(1, 2).clamp(min=_LOWEST)).exp_()
            out_grad = grads[:, :, start:end].flatten(1, 2).to(product_type)
            score_grad = torch.bmm(out_grad, values[:, low:high].transpose(1, 2)).float()
            score_grad.sub_(inner[:, :, start:end].flatten(1, 2)).mul_(weights).mul_(scale)
            score_grad = score_grad.to(product_type)
            q_grads.append(torch.bmm(score_grad, keys[:, low:high]).float().unflatten(1, (-1, end - start)))
            k_part = torch.bmm(score_grad.transpose(1, 2), rows).float()
            v_part = torch.bmm(weights.to(product_type).transpose(1, 2), out_grad).float()
            k_grad[:, low:high] += k_part
            v_grad[:, low:high] += v_part
            del scores, weights, score_grad
        return _ungrouped(torch.cat(q_grads, dim=2), q), unflatten_heads(k_grad, k), unflatten_heads(v_grad, v)

    def _spans(self, queries: Tensor, keys: Tensor, ranges: KeyRanges) -> Iterator[_Span]:
        """Iterate over blocks of queries, with the keys that each may see."""
        groups, repeats, num_queries, _ = queries.shape
        num_keys = keys.shape[1]
        rows = block_rows(groups * repeats, num_keys)
        known = ranges.known
        firsts: list[int] | None = None
        if self.looks and not torch.compiler.is_compiling():
            firsts = ranges.first.amin(dim=0).tolist()
            known = known or (_each(ranges.last), _each(ranges.keys))
        for start in range(0, num_queries, rows):
            end = min(start + rows, num_queries)
            low, high = 0, num_keys
            if known is not None:
                lasts, keys_known = known
                high = _number_before(keys_known, _position(lasts, end - 1) + 1)
                if firsts is not None:
                    low = _number_before(keys_known, min(firsts[start:end]))
                elif ranges.window is not None:
                    low = _number_before(keys_known, _position(lasts, start) - ranges.window + 1)
            yield _Span(start, end, low, max(low, high))


def _number_before(pieces: Pieces, position: int) -> int:
    """Number of positions before a position."""
    number = 0
    for piece in pieces:
        number += len(range(piece.start, min(piece.stop, max(piece.start, position)), piece.step))
    return number


def _position(pieces: Pieces, index: int) -> int:
    """Position with a number of others before it."""
    for piece in pieces:
        if index < len(piece):
            return piece[index]
        index -= len(piece)
    raise IndexError(index)


def _each(positions: Tensor) -> Pieces:
    """Positions as pieces of one."""
    return tuple(range(position, position + 1) for position in positions.tolist())


def whole_rows(q: Tensor, starts: Tensor | None, window: int | None = None) -> KeyRanges:
    """Ranges of the queries of whole rows, (S, B, N, H).

    Args:
        starts: (B, S) int64, first position of each position's document; None: a row is one document.
    """
    length = q.shape[0]
    ranges = KeyRanges.of(starts, torch.arange(length, device=q.device), window)
    return replace(ranges, known=((range(length),), (range(length),)))


_LOWEST = torch.finfo(torch.float32).min / 2
"""Least maximum of the scores of a row: scores of -inf minus it stay -inf, where all scores of a row are."""

_TINY = torch.finfo(torch.float32).tiny
"""Least divisor of an output: a query that sees no key has an output of zeros."""


def _scores(rows: Tensor, keys: Tensor, ranges: KeyRanges, span: _Span) -> Tensor:
    """Scaled scores of a block, -inf where a query does not see a key: (G, R * rows, keys) float32."""
    scores = torch.bmm(rows, keys.transpose(1, 2)).float().mul_(1.0 / math.sqrt(rows.shape[-1]))
    start, end, low, high = span
    positions = ranges.keys[low:high]
    after = positions > ranges.last[start:end, None]
    before = positions < ranges.first[:, start:end, None]
    hidden = (after | before)[:, None, None]  # (B, 1, 1, rows, keys)
    by_head = scores.view(hidden.shape[0], -1, scores.shape[1] // (end - start), end - start, high - low)
    # CUDA would read the number back from the device; on XLA a number would be a float64 parameter of the graph.
    unseen = float("-inf") if by_head.is_cuda else by_head.new_full((), float("-inf"))
    by_head.masked_fill_(hidden, unseen)
    return scores


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """(G, R, Q, H) to the shape of `like`, (Q, B, N, H)."""
    heads: Tensor = x.unflatten(0, (like.shape[1], -1))
    return heads.permute(3, 0, 1, 2, 4).flatten(2, 3)
