"""Blocked attention on XLA by loops inside the graph, so that the graph does not grow with the sequence length.

Up to `XLA_LOOPS` blocks of queries are unrolled in the graph, as on other devices. More blocks are iterations of graph
loops: the queries, keys and results of an iteration are slices at its offsets.

Causal attention over whole sequences has up to four loops. The blocks of a loop use the keys up to the loop's last
query. So 5/8 of the score matrix is computed, of which causal attention needs half. With a sliding window, the range of
keys moves with the queries in one loop.

Shapes: see `backends/ranged_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nxtrain.backends.limits import XLA_LOOPS, block_rows
from nxtrain.backends.ranged_attention import Blocks, block_gradients, block_output, grouped_results, ungrouped
from nxtrain.backends.torch_attention import unflatten_heads
from nxtrain.backends.xla.loops import Offset, repeat, sliced, updated
from nxtrain.common.kernels import KeyRanges


class _Loop(NamedTuple):
    """Loop of the graph over blocks with equal numbers of queries.

    Args:
        start: First query of the first block.
        rows: Queries per block.
        rounds: Number of blocks, the iterations of the loop.
        low: First key of the first block, and its increment per block.
        width: Keys per block.
    """

    start: int
    rows: int
    rounds: int
    low: Offset
    width: int


class LoopedBlocks(Blocks):
    """Blocked attention whose blocks of queries are iterations of a graph loop if there are many."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        queries, keys, values = self.grouped(q, k, v)
        rows = block_rows(queries.shape[0] * queries.shape[1], k.shape[0])
        if q.shape[0] <= XLA_LOOPS * rows:
            return super().attend(q, k, v, ranges)
        fixed = queries, keys, values, ranges.first, ranges.last, ranges.keys
        state = [torch.zeros_like(queries, dtype=torch.float32)]
        state.append(torch.zeros(queries.shape[:3], dtype=torch.float32, device=q.device))
        for loop in _loops(q.shape[0], k.shape[0], rows, ranges):

            def a_round(start: Tensor, low: Tensor, *given: Tensor, loop: _Loop = loop) -> list[Tensor]:
                queries, keys, values, *bounds, outs, sums = given
                seen = _seen(bounds, start, low, loop)
                keys, values = (sliced(x, 1, low, loop.width) for x in (keys, values))
                out, log_sums = block_output(sliced(queries, 2, start, loop.rows), keys, values, seen)
                return [updated(outs, 2, start, out), updated(sums, 2, start, log_sums)]

            state = repeat(loop.rounds, a_round, [Offset(loop.start, loop.rows), loop.low], fixed, state)
        outs, sums = state
        return ungrouped(outs, q), sums.reshape(q.shape[1], q.shape[2], -1)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.grouped(q, k, v)
        rows = block_rows(queries.shape[0] * queries.shape[1], k.shape[0])
        if q.shape[0] <= XLA_LOOPS * rows:
            return super().attend_backward(grad, q, k, v, out, log_sums, ranges)
        results = grouped_results(grad, out, log_sums, k.shape[2])
        fixed = queries, keys, values, *results, ranges.first, ranges.last, ranges.keys
        state = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (queries, keys, values)]
        for loop in _loops(q.shape[0], k.shape[0], rows, ranges):

            def a_round(start: Tensor, low: Tensor, *given: Tensor, loop: _Loop = loop) -> list[Tensor]:
                queries, keys, values, grads, inner, sums, *bounds, q_grad, k_grad, v_grad = given
                seen = _seen(bounds, start, low, loop)
                of_rows = [sliced(x, 2, start, loop.rows) for x in (queries, grads, inner, sums)]
                keys, values = (sliced(x, 1, low, loop.width) for x in (keys, values))
                q_part, *parts = block_gradients(of_rows[0], keys, values, of_rows[1:], seen)
                totals = [
                    updated(total, 1, low, sliced(total, 1, low, loop.width) + part)
                    for total, part in zip((k_grad, v_grad), parts, strict=True)
                ]
                return [updated(q_grad, 2, start, q_part), *totals]

            state = repeat(loop.rounds, a_round, [Offset(loop.start, loop.rows), loop.low], fixed, state)
        q_grad, k_grad, v_grad = state
        return ungrouped(q_grad, q), unflatten_heads(k_grad, k), unflatten_heads(v_grad, v)


def _loops(num_queries: int, num_keys: int, rows: int, ranges: KeyRanges) -> Iterator[_Loop]:
    """Divide the queries into loops over equal blocks, and a last block for the remaining queries."""
    whole_rounds, rest = divmod(num_queries, rows)
    if ranges.known != ((range(num_queries),), (range(num_keys),)):  # part of a sequence, or ranks share the graph
        yield _Loop(0, rows, whole_rounds, Offset(0, 0), num_keys)
    elif ranges.window is not None:
        width = min(num_keys, rows + ranges.window - 1)
        yield _Loop(0, rows, whole_rounds, Offset(1 - ranges.window, rows), width)
    else:
        most = -(-whole_rounds // XLA_LOOPS)
        for before in range(0, whole_rounds, most):
            rounds = min(most, whole_rounds - before)
            yield _Loop(before * rows, rows, rounds, Offset(0, 0), (before + rounds) * rows)
    if rest:
        yield _Loop(num_queries - rest, rest, 1, Offset(0, 0), num_keys)


def _seen(bounds: list[Tensor], start: Tensor, low: Tensor, loop: _Loop) -> KeyRanges:
    """Slice a block's key ranges from the first and last positions of all queries and the positions of all keys."""
    first, last, keys = bounds
    return KeyRanges(
        sliced(first, 1, start, loop.rows), sliced(last, 0, start, loop.rows), sliced(keys, 0, low, loop.width)
    )
