"""Blocked attention to a range of keys per query by matrix products, with memory linear in the sequence length.

A block of queries is multiplied by all keys that any of its queries may attend to. Only the log-sums of the softmax are
saved, and the backward pass recomputes the probabilities.

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
    """Block of attention scores: queries `start` to `end - 1`, and keys `low` to `high - 1`."""

    start: int
    end: int
    low: int
    high: int


class AttentionToRanges(Protocol):
    """Interface of attention to key ranges, forward and backward, as in `Kernels`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sums; see `Kernels.attend`."""
        ...

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of queries, keys and values; see `Kernels.attend_backward`."""
        ...


class RangedAttention(torch.autograd.Function):
    """Autograd function of attention to key ranges by the kernels of a device.

    Queries and output are (Q, B, N, H); keys and values are (K, B, M, H).
    """

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
    """Autograd function of attention to key ranges with attention sinks, by the kernels of a device.

    A sink is a learned score per head without a value. It adds one term to the denominator of the softmax, so the
    output is multiplied by the share of the other terms. The gradients of queries, keys and values are those of
    attention without sinks with the larger denominator.

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
    """Blocked attention to key ranges by elementary operations.

    Args:
        looks: The host can read the key ranges at no cost, so a block skips keys that no query attends to.
        score_type: Type in which queries are multiplied by keys; None for the type of the queries.
    """

    looks: bool = False
    score_type: torch.dtype | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sums block by block; see `Kernels.attend`."""
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
        """Compute the gradients of queries, keys and values block by block; see `Kernels.attend_backward`."""
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
        """Rearrange by key/value head: queries (G, R, Q, H), and keys and values (G, K, H) in the product type."""
        product_type = self.score_type or q.dtype
        keys, values = (flatten_heads(x).to(product_type) for x in (k, v))
        return group_heads(q, k.shape[2]), keys, values

    def _spans(self, queries: Tensor, keys: Tensor, ranges: KeyRanges) -> Iterator[_Span]:
        """Iterate over blocks of queries, each with the keys that its queries may attend to."""
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
    """Count the positions of sequence pieces that are before a given position."""
    number = 0
    for piece in pieces:
        number += len(range(piece.start, min(piece.stop, max(piece.start, position)), piece.step))
    return number


def _position(pieces: Pieces, index: int) -> int:
    """Return the position at an index into the concatenated positions of sequence pieces."""
    for piece in pieces:
        if index < len(piece):
            return piece[index]
        index -= len(piece)
    raise IndexError(index)


def _each(positions: Tensor) -> Pieces:
    """Convert a tensor of positions to pieces of one position each."""
    return tuple(range(position, position + 1) for position in positions.tolist())


def whole_rows(q: Tensor, starts: Tensor | None, window: int | None = None) -> KeyRanges:
    """Return the key ranges of causal attention over whole sequences, with optional documents and window.

    Args:
        q: (S, B, N, H) queries.
        starts: (B, S) int64, first position of each position's document; None if a sequence is one document.
        window: Most keys that a query attends to; None for no limit.
    """
    length = q.shape[0]
    ranges = KeyRanges.of(starts, torch.arange(length, device=q.device), window)
    return replace(ranges, known=((range(length),), (range(length),)))


_LOWEST = torch.finfo(torch.float32).min / 2
"""Lower bound of a row's maximum score, so that a row with only -inf scores keeps them after subtraction."""

_TINY = torch.finfo(torch.float32).tiny
"""Lower bound of the softmax denominator, so that a query without visible keys has an output of zeros."""


def grouped_results(grad: Tensor, out: Tensor, log_sums: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rearrange by key/value head: output gradients (G, R, Q, H), their products with outputs, and log-sums.

    The products and the log-sums are (G, R, Q, 1).
    """
    inner = group_heads((grad.float() * out).sum(dim=-1, keepdim=True), num_kv_heads)
    return group_heads(grad, num_kv_heads), inner, log_sums.reshape(inner.shape)


def block_output(rows: Tensor, keys: Tensor, values: Tensor, seen: KeyRanges) -> tuple[Tensor, Tensor]:
    """Compute the float32 output of a block of queries, and the log-sums of its softmax.

    Args:
        rows: Queries of the block, (G, R, rows, H).
        keys, values: Keys and values of the block, (G, K, H), in the product type.
        seen: Key ranges of the block.
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
    """Compute the float32 gradients of a block's queries, keys and values.

    Args:
        rows, keys, values, seen: See `block_output`.
        results: Results of `grouped_results`, restricted to the block.
    """
    grads, inner, sums = (x.flatten(1, 2) for x in results)
    queries, out_grad = rows.flatten(1, 2).to(keys.dtype), grads.to(keys.dtype)
    scores = _scores(queries, keys, seen)
    # A query without visible keys has a log-sum of -inf, and zero weights.
    weights = scores.sub_(sums.clamp(min=_LOWEST)).exp_()
    score_grad = torch.bmm(out_grad, values.transpose(1, 2)).float()
    score_grad.sub_(inner).mul_(weights).mul_(1.0 / math.sqrt(rows.shape[-1]))
    score_grad = score_grad.to(keys.dtype)
    q_grad = torch.bmm(score_grad, keys).float().unflatten(1, rows.shape[1:3])
    k_grad = torch.bmm(score_grad.transpose(1, 2), queries).float()
    v_grad = torch.bmm(weights.to(keys.dtype).transpose(1, 2), out_grad).float()
    return q_grad, k_grad, v_grad


def _seen(ranges: KeyRanges, span: _Span) -> KeyRanges:
    """Return the key ranges of one block."""
    start, end, low, high = span
    return KeyRanges(ranges.first[:, start:end], ranges.last[start:end], ranges.keys[low:high])


def _scores(rows: Tensor, keys: Tensor, seen: KeyRanges) -> Tensor:
    """Compute the scaled scores of a block, -inf for masked keys: (G, R * rows, keys) float32."""
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
    """Rearrange (G, R, Q, H) to the shape of `like`, (Q, B, N, H)."""
    heads: Tensor = x.unflatten(0, (like.shape[1], -1))
    return heads.permute(3, 0, 1, 2, 4).flatten(2, 3)
