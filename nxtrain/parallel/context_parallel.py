"""Context parallelism: ranks share the positions of a sequence, and exchange keys and values.

Every layer but attention works on positions alone, so that a rank computes its positions as if they were a sequence of
their own. In attention, the queries of a rank meet the keys and values of all ranks. A query sees the keys between the
first position of its document and its own; positions decide, not the place of a token in a rank's tensors.

Gather: every rank collects all keys and values, and the gradients are scattered back as sums. Ring: the keys and values
of one rank at a time pass by, and their gradients travel with them, so that no rank holds those of the whole sequence.
A block visits the ranks whose documents and windows may reach it, and passes over the others.
Both save the rank's own tensors only, and exchange keys and values once more in the backward pass.

Shapes: S sequence, T = S / cp positions of this rank, B batch, N query heads, K key/value heads, H head dimension.

Source: Liu et al. 2023 (arXiv:2310.01889) for the ring; Grattafiori et al. 2024 (arXiv:2407.21783) section 3.3.2 for
the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.layers import ContextAttention, RingAttention
from nxtrain.common.mesh import Axis
from nxtrain.common.sequence_cut import ContextMethod, SequenceCut


@dataclass(frozen=True)
class ContextParallel(ContextAttention):
    """Context parallel ranks of a model, with which every attention is built.

    Args:
        axis: Context parallel axis.
        cut: Division of the sequences between the ranks.
        method: Exchange of keys and values.
        comm: Collectives.
        kernels: Kernels of the device.
        ring: Kernel that passes keys and values on itself, for layers whose queries see all keys before them; None:
            there is none.
    """

    axis: Axis
    cut: SequenceCut
    method: ContextMethod
    comm: Collectives
    kernels: Kernels
    ring: RingAttention | None = None
    _hops: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Hops by the window of a layer, of each uploaded tensor of documents."""

    @property
    def positions(self) -> Tensor:  # type: ignore[override]
        return self.positions_of(self.axis.rank)

    def positions_of(self, rank: int) -> Tensor:
        """Positions of a rank on the host, ascending: (T,) int64."""
        return torch.tensor(self.cut.listed(rank), device="cpu")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        if self.ring is not None and starts is None and window is None:
            return _FusedRing.apply(q, k, v, self.ring)  # type: ignore[no-any-return]
        ranges = KeyRanges.of(starts, positions, window)
        # A graph has no number for each position: under torch.compile every query meets all keys, as on lazy devices.
        if not (self.comm.lazy or torch.compiler.is_compiling()):
            ranges = replace(ranges, known=(self.cut.positions(self.axis.rank), (range(self.cut.seq_len),)))
        if self.method == "ring":
            return _Ring.apply(q, k, v, ranges, self)  # type: ignore[no-any-return]
        return _Gather.apply(q, k, v, ranges, self)  # type: ignore[no-any-return]

    def learn(self, uploaded: Tensor, starts: Tensor) -> None:
        self._hops[uploaded] = cache(partial(hops_seen, self.cut, starts=starts))

    def hops(self, ranges: KeyRanges) -> tuple[int, ...]:
        """Hops of a ring at which a query of any rank may see the keys that arrive."""
        hops_of: Callable[[int | None], tuple[int, ...]] | None = None
        if ranges.starts is not None:
            hops_of = self._hops.get(ranges.starts)
        return hops_of(ranges.window) if hops_of else _hops_of_rows(self.cut, ranges.window)

    def moved(self, positions: Tensor, source: int) -> Tensor:
        """Compute the positions of another rank on the device, from the positions of this rank: (T,) int64."""
        hops = source - self.axis.rank
        if self.cut.layout == "striped":
            return positions + hops
        length = len(positions)
        if self.cut.layout == "contiguous":
            return positions + hops * length
        piece = length // 2
        return torch.cat([positions[:piece] + hops * piece, positions[piece:] - hops * piece])

    def in_order(self, x: Tensor) -> Tensor:
        """Sort rows of all ranks, given rank after rank, by position: (S, ...) to the same shape."""
        if self.cut.layout == "contiguous":
            return x
        if self.cut.layout == "striped":
            return x.view(self.axis.size, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        pieces = x.view(self.axis.size, 2, -1, *x.shape[1:])
        return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)]).flatten(0, 1)

    def by_rank(self, x: Tensor) -> Tensor:
        """Inverse of `in_order`."""
        if self.cut.layout == "contiguous":
            return x
        if self.cut.layout == "striped":
            return x.reshape(-1, self.axis.size, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        from_start, from_end = x.reshape(2, self.axis.size, -1, *x.shape[1:])
        return torch.stack([from_start, from_end.flip(0)], dim=1).flatten(0, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, context: ContextParallel) -> Tensor:
        keys, values, ranges = _gathered(k, v, ranges, context)
        wide, log_sums = context.kernels.attend(q, keys, values, ranges)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.ranges, ctx.context = ranges, context
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        context: ContextParallel = ctx.context
        keys, values, ranges = _gathered(k, v, ctx.ranges, context)
        q_grad, *grads = context.kernels.attend_backward(grad, q, keys, values, out, log_sums, ranges)
        packed = context.by_rank(torch.cat(grads, dim=2).float()).contiguous()
        k_grad, v_grad = context.comm.reduce_scatter(packed, context.axis).chunk(2, dim=2)
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None


def _gathered(k: Tensor, v: Tensor, ranges: KeyRanges, context: ContextParallel) -> tuple[Tensor, Tensor, KeyRanges]:
    """Keys and values of all positions in order, (S, B, K, H) each, and the ranges of queries among them."""
    packed = torch.cat([k, v], dim=2).contiguous()
    keys, values = context.in_order(context.comm.all_gather(packed, context.axis)).chunk(2, dim=2)
    whole = torch.arange(keys.shape[0], device=keys.device)
    return keys, values, replace(ranges, keys=whole)


class _FusedRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        out, log_sums = ring.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        grads = ctx.ring.attend_backward(grad, q, k, v, out, log_sums)
        return (*(x.to(q.dtype) for x in grads), None)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, context: ContextParallel) -> Tensor:
        kernels, axis = context.kernels, context.axis
        block = torch.cat([k, v], dim=2).contiguous()
        hops = context.hops(ranges)
        for hop, next_hop in zip(hops, [*hops[1:], axis.size], strict=True):
            source = (axis.rank - hop) % axis.size
            passing = None
            if next_hop < axis.size:
                passing = context.comm.start_shift(block, axis, next_hop - hop)
            block_ranges = _of_block(ranges, source, context)
            if block_ranges is not None:
                keys, values = block.chunk(2, dim=2)
                part, part_sums = kernels.attend(q, keys, values, block_ranges)
                if hop == 0:  # the rank's own keys, of which every query sees one
                    out, log_sums = part.float(), part_sums
                else:
                    out, log_sums = _joined(out, log_sums, part, part_sums)
            if passing is not None:
                block = passing.wait()
        narrow = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, narrow, log_sums)
        ctx.ranges, ctx.context = ranges, context
        return narrow

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        context: ContextParallel = ctx.context
        ranges = ctx.ranges
        kernels = context.kernels
        axis = context.axis
        q_grad = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        block = torch.cat([k, v], dim=2).contiguous()
        block_grad = torch.zeros(block.shape, dtype=torch.float32, device=q.device)
        returning = None
        hops = context.hops(ranges)
        for hop, next_hop in zip(hops, [*hops[1:], axis.size], strict=True):
            source = (axis.rank - hop) % axis.size
            passing = None
            if next_hop < axis.size:
                passing = context.comm.start_shift(block, axis, next_hop - hop)
            part: Tensor | None = None
            block_ranges = _of_block(ranges, source, context)
            if block_ranges is not None:
                keys, values = block.chunk(2, dim=2)
                q_part, *parts = kernels.attend_backward(grad, q, keys, values, out, log_sums, block_ranges)
                q_grad += q_part
                part = torch.cat(parts, dim=2)
            # The gradient of a block follows one transfer later, with what the earlier ranks have added.
            if returning is not None:
                block_grad = returning.wait()
            if part is not None:
                block_grad = block_grad + part
            # After the last hop it goes back to the rank of the block.
            returning = context.comm.start_shift(block_grad, axis, next_hop - hop)
            if passing is not None:
                block = passing.wait()
        assert returning is not None
        k_grad, v_grad = returning.wait().chunk(2, dim=2)
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None


def hops_seen(cut: SequenceCut, window: int | None, starts: Tensor | None = None) -> tuple[int, ...]:
    """Hops of a ring at which a query of any rank sees a key that arrives, ascending from 0.

    Args:
        cut: Division of the sequences.
        window: Most positions that a query sees, its own among them; None: no limit.
        starts: (B, S) first position of each position's document, on the host; None: a row is one document.
    """
    # Of numpy, since tensors have no values while a step is traced.
    first = np.zeros((1, cut.seq_len), dtype=np.int64) if starts is None else starts.numpy()
    if window is not None:
        first = np.maximum(first, np.arange(cut.seq_len) - (window - 1))
    return tuple(hop for hop in range(cut.size) if _is_seen(cut, hop, first))


@lru_cache(maxsize=64)
def _hops_of_rows(cut: SequenceCut, window: int | None) -> tuple[int, ...]:
    """`hops_seen` of rows that are one document each."""
    return hops_seen(cut, window)


def _is_seen(cut: SequenceCut, hop: int, first: np.ndarray) -> bool:
    """True if some rank sees keys of the rank `hop` ranks before; first: (B, S) first position that each query sees."""
    for rank in range(cut.size):
        source = (rank - hop) % cut.size
        for queries, keys in product(cut.positions(rank), cut.positions(source)):
            nearest = np.minimum(np.arange(queries.start, queries.stop, queries.step), keys[-1])
            nearest -= (nearest - keys.start) % keys.step  # the last key that is not after the query
            seen = (nearest >= keys.start) & (nearest >= first[:, queries.start : queries.stop : queries.step])
            if seen.any():
                return True
    return False


def _of_block(ranges: KeyRanges, source: int, context: ContextParallel) -> KeyRanges | None:
    """Ranges of this rank's queries among the keys of a rank; None: the queries see no key, as the host knows."""
    own, theirs = context.cut.positions(context.axis.rank), context.cut.positions(source)
    if theirs[0][0] > own[-1][-1]:
        return None
    keys = context.moved(ranges.last, source)
    of_block = replace(ranges, keys=keys, known=(own, theirs))
    return of_block if context.kernels.sees(of_block) else None


def _joined(out: Tensor, log_sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of two blocks, from the attention to each: outputs (T, B, N, H), sums (B, N, T)."""
    joined = torch.logaddexp(log_sums, part_sums)
    # A query that has seen no key yet has sums of -inf, and both of its outputs are zeros.
    anchor = joined.masked_fill(joined == float("-inf"), 0.0)
    shares = [(sums - anchor).exp().permute(2, 0, 1).unsqueeze(-1) for sums in (log_sums, part_sums)]
    return out * shares[0] + part * shares[1], joined
