"""Context parallelism: each rank holds some positions of a sequence, and attention exchanges keys and values.

All layers but attention work on each position separately, so a rank computes its own positions alone. In attention, the
queries of a rank meet the keys and values of all ranks. A query sees the keys from the first position of its document
up to its own position. The mask is computed from positions, not from indices into a rank's tensors.

There are two methods. With `gather`, every rank all-gathers all keys and values, and backward reduce-scatters their
gradients. With `ring`, keys and values are passed from rank to rank, and their gradients travel with them, so no rank
holds the keys of the whole sequence. A block of keys skips the ranks whose documents and windows cannot reach it. Both
methods save only the rank's own tensors, and exchange keys and values again in the backward pass.

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
    """Attention of a model whose sequences are divided between context parallel ranks.

    Args:
        axis: Context parallel axis.
        cut: Division of the sequences between the ranks.
        method: Method of exchanging keys and values, `gather` or `ring`.
        comm: Collectives.
        kernels: Kernels of the device.
        ring: Fused kernel that computes attention and passes keys and values on. It serves layers with a plain causal
            mask. None if the device has no such kernel.
    """

    axis: Axis
    cut: SequenceCut
    method: ContextMethod
    comm: Collectives
    kernels: Kernels
    ring: RingAttention | None = None
    _hops: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Cached steps of the ring that are not skipped, by attention window, for each uploaded tensor of documents."""

    @property
    def positions(self) -> Tensor:  # type: ignore[override]
        return self.positions_of(self.axis.rank)

    def positions_of(self, rank: int) -> Tensor:
        """Positions of the sequence that a rank holds, ascending, as a tensor on the host: (T,) int64."""
        return torch.tensor(self.cut.listed(rank), device="cpu")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        if self.ring is not None and starts is None and window is None:
            return _FusedRing.apply(q, k, v, self.ring)  # type: ignore[no-any-return]
        ranges = KeyRanges.of(starts, positions, window)
        # Compiled graphs cannot depend on positions: under torch.compile queries meet all keys, as on lazy devices.
        if not (self.comm.lazy or torch.compiler.is_compiling()):
            ranges = replace(ranges, known=(self.cut.positions(self.axis.rank), (range(self.cut.seq_len),)))
        if self.method == "ring":
            return _Ring.apply(q, k, v, ranges, self)  # type: ignore[no-any-return]
        return _Gather.apply(q, k, v, ranges, self)  # type: ignore[no-any-return]

    def learn(self, uploaded: Tensor, starts: Tensor) -> None:
        self._hops[uploaded] = cache(partial(visible_hops, self.cut, starts=starts))

    def hops(self, ranges: KeyRanges) -> tuple[int, ...]:
        """Steps of the ring (hops) at which a query of any rank may attend to arriving keys; all others are skipped.

        Hop h brings the keys of the rank h places before.
        """
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
        """Sort rows by position: (S, ...), given rank after rank, to the same shape."""
        if self.cut.layout == "contiguous":
            return x
        if self.cut.layout == "striped":
            return x.view(self.axis.size, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        pieces = x.view(self.axis.size, 2, -1, *x.shape[1:])
        return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)]).flatten(0, 1)

    def by_rank(self, x: Tensor) -> Tensor:
        """Reorder rows from the order of positions to rank after rank; the inverse of `in_order`."""
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
    """All-gather keys and values, sorted by position: (S, B, K, H) each, with the key ranges of this rank's queries."""
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
            # The gradient of a block arrives one transfer after the block, with the sums of the earlier ranks.
            if returning is not None:
                block_grad = returning.wait()
            if part is not None:
                block_grad = block_grad + part
            # After the last hop, the gradient returns to the rank that owns the block.
            returning = context.comm.start_shift(block_grad, axis, next_hop - hop)
            if passing is not None:
                block = passing.wait()
        assert returning is not None
        k_grad, v_grad = returning.wait().chunk(2, dim=2)
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None


def visible_hops(cut: SequenceCut, window: int | None, starts: Tensor | None = None) -> tuple[int, ...]:
    """Steps of a ring (hops) at which a query of any rank attends to the arriving keys, ascending from 0.

    Args:
        cut: Division of the sequences between the ranks.
        window: Most positions that a query sees, including its own; None for no limit.
        starts: (B, S) first position of each position's document, on the host; None if each row is one document.
    """
    # In numpy, since tensors have no values while a step is traced.
    first = np.zeros((1, cut.seq_len), dtype=np.int64) if starts is None else starts.numpy()
    if window is not None:
        first = np.maximum(first, np.arange(cut.seq_len) - (window - 1))
    return tuple(hop for hop in range(cut.size) if _is_visible(cut, hop, first))


@lru_cache(maxsize=64)
def _hops_of_rows(cut: SequenceCut, window: int | None) -> tuple[int, ...]:
    """Cached result of `visible_hops` for rows that are one document each."""
    return visible_hops(cut, window)


def _is_visible(cut: SequenceCut, hop: int, first: np.ndarray) -> bool:
    """True if a query of any rank attends to keys of the rank `hop` places before it on the ring.

    Args:
        cut: Division of the sequences between the ranks.
        hop: Distance between the two ranks.
        first: (B, S) first position that each query sees.
    """
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
    """Key ranges of this rank's queries in another rank's block of keys; None if the host knows the block is masked."""
    own, theirs = context.cut.positions(context.axis.rank), context.cut.positions(source)
    if theirs[0][0] > own[-1][-1]:
        return None
    keys = context.moved(ranges.last, source)
    of_block = replace(ranges, keys=keys, known=(own, theirs))
    return of_block if context.kernels.has_visible_keys(of_block) else None


def _joined(out: Tensor, log_sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention to two blocks of keys by their log-sum-exps: outputs (T, B, N, H) and sums (B, N, T)."""
    joined = torch.logaddexp(log_sums, part_sums)
    # A query that has seen no key in either block has sums of -inf, and its outputs are zeros.
    anchor = joined.masked_fill(joined == float("-inf"), 0.0)
    shares = [(sums - anchor).exp().permute(2, 0, 1).unsqueeze(-1) for sums in (log_sums, part_sums)]
    return out * shares[0] + part * shares[1], joined
