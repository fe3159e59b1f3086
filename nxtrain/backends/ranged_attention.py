"""Attention to ranges of keys by matrix products, block by block, with memory linear in the sequence.

A block of queries meets all keys that any of its queries may see. Only sums of the weights are saved; the backward pass
computes the weights again.

Shapes: Q queries, K keys, B batch, N query heads, M key/value heads, R = N / M, G = B * M groups, H head dimension.

Source: Dao et al. 2022 (arXiv:2205.14135) for the sums that are saved, and for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nxtrain.backends.limits import block_rows
from nxtrain.backends.torch_attention import flatten_heads, group_heads, unflatten_heads
from nxtrain.common.kernels import KeyRanges, Pieces


class _Span(NamedTuple):
    """Block of an attention: queries from `start` to before `end`, and keys from `low` to before `high`."""

    start: int
    end: int
    low: int
    high: int


class AttentionToRanges(Protocol):
    """Both passes of an attention to ranges of keys, as `Kernels` has them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        ...

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        ...


class RangedAttention(torch.autograd.Function):
    """Attention to ranges of keys, (Q, B, N, H), (K, B, M, H) twice to (Q, B, N, H), by the kernels of a device."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, kernels: AttentionToRanges) -> Tensor:
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


class SinkAttention(torch.autograd.Function):
    """Attention to ranges of keys, and to a score of each head that has no value, by the kernels of a device.

    The sink is one more weight of the softmax. So it lowers the output by its share of the sum, and the gradients of
    queries, keys and values are those of the ranges with the larger sum.

    Source: Xiao et al. 2023 (arXiv:2309.17453) section 3.3; OpenAI 2025 (arXiv:2508.10925) section 2.3.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ranges: KeyRanges, kernels: AttentionToRanges
    ) -> Tensor:
        wide, log_sums = kernels.attend(q, k, v, ranges)
        of_heads = sinks.float().view(-1, 1)
        peaks = torch.maximum(log_sums, of_heads)
        # torch-xla computes `logaddexp` on the host.
        totals = peaks + ((log_sums - peaks).exp() + (of_heads - peaks).exp()).log()
        shares = (log_sums - totals).exp().permute(2, 0, 1).unsqueeze(-1)
        out = (wide * shares).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, totals)
        ctx.ranges, ctx.kernels = ranges, kernels
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, totals = ctx.saved_tensors
        grads = ctx.kernels.attend_backward(grad, q, k, v, out, totals, ctx.ranges)
        q_grad, k_grad, v_grad = (x.to(q.dtype) for x in grads)
        inner = (grad.float() * out).sum(dim=-1).permute(1, 2, 0)
        of_sinks = (sinks.float().view(-1, 1) - totals).exp()
        sinks_grad = -(of_sinks * inner).sum(dim=(0, 2))
        return q_grad, k_grad, v_grad, sinks_grad.to(sinks.dtype), None, None


@dataclass(frozen=True)
class Blocks:
    """Division of an attention into blocks.

    Args:
        looks: The host reads the ranges at no cost, so that a block omits keys that none of its queries sees.
        score_type: Type in which queries are multiplied by keys; None: that of the queries.
    """

    looks: bool = False
    score_type: torch.dtype | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        queries, keys, values = self.grouped(q, k, v)
        outs, sums = [], []
        for span in self._spans(queries, keys, ranges):
            start, end, low, high = span
            if low == high:
                outs.append(torch.zeros_like(queries[:, :, start:end], dtype=torch.float32))
                sums.append(outs[-1].new_full(outs[-1].shape[:3], float("-inf")))
                continue
            rows = queries[:, :, start:end]
            out, log_sums = block_output(rows, keys[:, low:high], values[:, low:high], _seen(ranges, span))
            outs.append(out)
            sums.append(log_sums)
        return ungrouped(torch.cat(outs, dim=2), q), torch.cat(sums, dim=2).reshape(q.shape[1], q.shape[2], -1)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        queries, keys, values = self.grouped(q, k, v)
        grads, inner, sums = grouped_results(grad, out, log_sums, k.shape[2])
        k_grad = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
        v_grad = torch.zeros_like(k_grad)
        q_grads = []
        for span in self._spans(queries, keys, ranges):
            start, end, low, high = span
            rows = queries[:, :, start:end]
            if low == high:
                q_grads.append(torch.zeros_like(rows, dtype=torch.float32))
                continue
            results = [x[:, :, start:end] for x in (grads, inner, sums)]
            q_part, k_part, v_part = block_gradients(
                rows, keys[:, low:high], values[:, low:high], results, _seen(ranges, span)
            )
            q_grads.append(q_part)
            k_grad[:, low:high] += k_part
            v_grad[:, low:high] += v_part
        return ungrouped(torch.cat(q_grads, dim=2), q), unflatten_heads(k_grad, k), unflatten_heads(v_grad, v)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (G, R, Q, H), and keys and values (G, K, H) in the type of products."""
        product_type = self.score_type or q.dtype
        keys, values = (flatten_heads(x).to(product_type) for x in (k, v))
        return group_heads(q, k.shape[2]), keys, values

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
    """Count the positions of some pieces that are before a position."""
    number = 0
    for piece in pieces:
        number += len(range(piece.start, min(piece.stop, max(piece.start, position)), piece.step))
    return number


def _position(pieces: Pieces, index: int) -> int:
    """Position with an index among all positions of some pieces."""
    for piece in pieces:
        if index < len(piece):
            return piece[index]
        index -= len(piece)
    raise IndexError(index)


def _each(positions: Tensor) -> Pieces:
    """Pieces of one position each."""
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


def grouped_results(grad: Tensor, out: Tensor, log_sums: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the outputs (G, R, Q, H), their products with the outputs, and the sums, (G, R, Q, 1) each."""
    inner = group_heads((grad.float() * out).sum(dim=-1, keepdim=True), num_kv_heads)
    return group_heads(grad, num_kv_heads), inner, log_sums.reshape(inner.shape)


def block_output(rows: Tensor, keys: Tensor, values: Tensor, seen: KeyRanges) -> tuple[Tensor, Tensor]:
    """Output of a block in float32, and the logarithms of the sums of its weights.

    Args:
        rows: Queries of the block, (G, R, rows, H).
        keys, values: Those that the block meets, (G, K, H), in the type of products.
        seen: Ranges of the block.
    """
    scores = _scores(rows.flatten(1, 2).to(keys.dtype), keys, seen)
    peak = scores.amax(dim=-1, keepdim=True).clamp(min=_LOWEST)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.bmm(weights.to(keys.dtype), values).float() / total.clamp(min=_TINY)
    sums = (total.log() + peak).squeeze(-1)
    return out.unflatten(1, rows.shape[1:3]), sums.unflatten(1, rows.shape[1:3])


def block_gradients(
    rows: Tensor, keys: Tensor, values: Tensor, results: Sequence[Tensor], seen: KeyRanges
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in float32 of a block's queries, keys and values.

    Args:
        rows, keys, values, seen: As for `block_output`.
        results: `grouped_results` of the block.
    """
    grads, inner, sums = (x.flatten(1, 2) for x in results)
    queries, out_grad = rows.flatten(1, 2).to(keys.dtype), grads.to(keys.dtype)
    scores = _scores(queries, keys, seen)
    # A query that sees no key at all has a sum of -inf, and no weights.
    weights = scores.sub_(sums.clamp(min=_LOWEST)).exp_()
    score_grad = torch.bmm(out_grad, values.transpose(1, 2)).float()
    score_grad.sub_(inner).mul_(weights).mul_(1.0 / math.sqrt(rows.shape[-1]))
    score_grad = score_grad.to(keys.dtype)
    q_grad = torch.bmm(score_grad, keys).float().unflatten(1, rows.shape[1:3])
    k_grad = torch.bmm(score_grad.transpose(1, 2), queries).float()
    v_grad = torch.bmm(weights.to(keys.dtype).transpose(1, 2), out_grad).float()
    return q_grad, k_grad, v_grad


def _seen(ranges: KeyRanges, span: _Span) -> KeyRanges:
    """Ranges of a block."""
    start, end, low, high = span
    return KeyRanges(ranges.first[:, start:end], ranges.last[start:end], ranges.keys[low:high])


def _scores(rows: Tensor, keys: Tensor, seen: KeyRanges) -> Tensor:
    """Scaled scores of a block, -inf where a query does not see a key: (G, R * rows, keys) float32."""
    scores = torch.bmm(rows, keys.transpose(1, 2)).float().mul_(1.0 / math.sqrt(rows.shape[-1]))
    after = seen.keys > seen.last[:, None]
    before = seen.keys < seen.first[:, :, None]
    hidden = (after | before)[:, None, None]  # (B, 1, 1, rows, keys)
    num_rows, num_keys = hidden.shape[-2:]
    by_head = scores.view(hidden.shape[0], -1, scores.shape[1] // num_rows, num_rows, num_keys)
    # CUDA would read the number back from the device; on XLA a number would be a float64 parameter of the graph.
    unseen = float("-inf") if by_head.is_cuda else by_head.new_full((), float("-inf"))
    by_head.masked_fill_(hidden, unseen)
    return scores


def ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """(G, R, Q, H) to the shape of `like`, (Q, B, N, H)."""
    heads: Tensor = x.unflatten(0, (like.shape[1], -1))
    return heads.permute(3, 0, 1, 2, 4).flatten(2, 3)
