"""Cases of `tests.support.contract` for attention by blocks and by context parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.ranged_attention import RangedAttention
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.sequence_cut import ContextMethod, CutLayout, SequenceCut
from nxtrain.parallel.context_parallel import ContextParallel, _Gather, _Ring
from tests.support.contract import Operand, Work
from tests.support.contract_ranges import LENGTHS, drawn_ranges, drawn_starts, exact_ranged, ranged_shapes, ranges_on

if TYPE_CHECKING:
    from tests.support.contract_functions import Ranks


def drawn_blocks(rng: Random) -> Kernels:
    """Kernels that look at ranges, or do not."""
    return rng.choice((FusedKernels(), CpuKernels()))


def ranged(ranks: Ranks, rng: Random) -> Work:
    """Attention of some queries to some keys, block by block."""
    ranges = drawn_ranges(rng, rng.choice((1, 2)), rng.choice(LENGTHS))
    q, kv = ranged_shapes(rng, ranges)
    kernels = drawn_blocks(rng)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return RangedAttention.apply(q, k, v, ranges_on(q.device, ranges), kernels)  # type: ignore[no-any-return]

    operands = {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)}
    label = f"RangedAttention on {q} and {kv}, {type(kernels).__name__}"
    return Work(label, operands, call, lambda q, k, v: exact_ranged(q, k, v, ranges)[0])


def gathered_context(ranks: Ranks, rng: Random) -> Work:
    """Attention of ranks that gather the keys of all."""
    return _context(ranks, rng, _Gather, "gather")


def ring_context(ranks: Ranks, rng: Random) -> Work:
    """Attention of ranks that pass their keys on."""
    return _context(ranks, rng, _Ring, "ring")


def _context(ranks: Ranks, rng: Random, function: Any, method: ContextMethod) -> Work:
    size, own, batch = ranks.axis.size, ranks.axis.rank, rng.choice((1, 2))
    layouts: tuple[CutLayout, ...] = ("contiguous", "zigzag", "striped")
    cut = SequenceCut(2 * size * rng.choice((1, 3, 40)), size, rng.choice(layouts))
    context = ContextParallel(ranks.axis, cut, method, ranks.comm, drawn_blocks(rng))
    starts, window = drawn_starts(rng, batch, cut.seq_len), rng.choice((None, 3))
    places = [context.positions_of(rank) for rank in range(size)]
    of_ranks = [KeyRanges.of(starts[:, place], place, window) for place in places]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function.apply(q, k, v, ranges_on(q.device, of_ranks[own]), context)  # type: ignore[no-any-return]

    def whole(x: Tensor) -> Tensor:
        """Keys of all ranks, which have equal ones, in order; the gradient is that of this rank's."""
        return torch.cat([x if rank == own else x.detach() for rank in range(size)])[torch.cat(places).argsort()]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, out = whole(k), whole(v), q.new_zeros(())
        for rank, ranges in enumerate(of_ranks):
            queries = q if rank == own else q.detach()
            part, _ = exact_ranged(queries, keys, values, replace(ranges, keys=torch.arange(cut.seq_len)))
            # Other ranks' queries have equal gradients, and give the keys of this rank their part.
            out = out + (part if rank == own else part - part.detach())
        return out

    kv_heads, repeats = rng.choice((1, 2)), rng.choice((1, 2))
    q, kv = (cut.seq_len // size, batch, kv_heads * repeats, 4), (cut.seq_len // size, batch, kv_heads, 4)
    operands = {"q": Operand(q, always=True), "k": Operand(kv, always=True), "v": Operand(kv, always=True)}
    return Work(f"{function.__name__} on {q} and {kv}, {cut}", operands, call, exact)
