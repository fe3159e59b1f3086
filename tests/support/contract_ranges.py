"""Cases of `tests.support.contract` for attention to ranges of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.ranged_attention import RangedAttention, SinkAttention
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.layers import RingAttention
from nxtrain.common.sequence_cut import ContextMethod, CutLayout, SequenceCut
from nxtrain.parallel.context_parallel import ContextParallel, _FusedRing, _Gather, _gathered, _Ring
from tests.support.contract import Operand, Shape, Update, Work, compare

if TYPE_CHECKING:
    from tests.support.contract_functions import Ranks


LENGTHS = (1, 2, 7, 127, 128, 129, 130)
"""Around the blocks of 128 that the CPU's attention computes together."""

Values = Mapping[str, Tensor]


def drawn_starts(rng: Random, batch: int, length: int) -> Tensor:
    """(batch, length) first position of each position's document."""
    rows = []
    for _ in range(batch):
        begin, row = 0, list[int]()
        while begin < length:
            size = min(rng.choice((1, 1, 2, 5, 40, 200)), length - begin)
            row += [begin] * size
            begin += size
        rows.append(row)
    return torch.tensor(rows)


def drawn_ranges(rng: Random, batch: int, length: int) -> KeyRanges:
    """Ranges of some queries of rows of documents among some of their keys, at times with a window."""
    positions = torch.arange(length)
    starts, window = drawn_starts(rng, batch, length), rng.choice((None, 1, 3, 50))
    queries, keys = (torch.tensor(sorted(rng.sample(range(length), rng.randint(1, length)))) for _ in range(2))
    ranges = KeyRanges.of(starts, positions, window)
    return KeyRanges(ranges.first[:, queries], queries, keys, window=window)


def ranges_on(device: torch.device, ranges: KeyRanges) -> KeyRanges:
    """The same ranges on a device."""
    return dataclasses.replace(
        ranges, first=ranges.first.to(device), last=ranges.last.to(device), keys=ranges.keys.to(device)
    )


def exact_ranged(q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """Softmax attention to ranges of keys by its formula, and the logarithms of the sums of the weights."""
    ranges = ranges_on(q.device, ranges)
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbnh,tbnh->bnst", q, k) / q.shape[-1] ** 0.5
    seen = (ranges.keys <= ranges.last[:, None]) & (ranges.keys >= ranges.first[:, :, None])
    weights = torch.where(seen[:, None], scores.exp(), 0.0)
    sums = weights.sum(-1)
    out = torch.einsum("bnst,tbnh->sbnh", weights / torch.where(sums > 0, sums, 1.0).unsqueeze(-1), v)
    return out, sums.log()


def ranged_shapes(rng: Random, ranges: KeyRanges) -> tuple[Shape, Shape]:
    """Shapes of the queries, and of keys and values."""
    kv_heads, repeats, width = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((2, 4, 8))
    batch = ranges.first.shape[0]
    return (len(ranges.last), batch, kv_heads * repeats, width), (len(ranges.keys), batch, kv_heads, width)


def attend(kernels: Kernels, rng: Random) -> Update:
    """Attention of some queries to some keys, and the logarithms of the sums."""
    ranges = drawn_ranges(rng, rng.choice((1, 2, 3)), rng.choice(LENGTHS))
    q, kv = ranged_shapes(rng, ranges)
    results: list[tuple[Tensor, Tensor]] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        out, sums = kernels.attend(q, k, v, ranges_on(q.device, ranges))
        results.append((out.cpu(), sums.cpu()))

    def check(before: Values, after: Values) -> None:
        q, k, v = (before[name].double() for name in "qkv")
        wanted, sums = exact_ranged(q, k, v, ranges)
        assert {x.dtype for x in results[-1]} == {torch.float32}
        compare("the output", results[-1][0], wanted, before["q"].dtype)
        assert torch.equal(results[-1][1].isinf(), sums.isinf())
        ours, theirs = (x.masked_fill(x.isinf(), 0.0) for x in (results[-1][1], sums))
        compare("the sums", ours, theirs, before["q"].dtype)

    label = f"attend of {type(kernels).__name__} on {q} queries and {kv} keys"
    return Update(label, {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)}, call, check)


def sink_attention(kernels: Kernels, rng: Random) -> Work:
    """Causal attention inside of documents, with a score of each head that has no value."""
    length, batch = rng.choice(LENGTHS), rng.choice((1, 2, 3))
    starts, window = drawn_starts(rng, batch, length), rng.choice((None, 1, 5))
    ranges = KeyRanges.of(starts, torch.arange(length), window)
    q, kv = ranged_shapes(rng, ranges)

    def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, sums = exact_ranged(q, k, v, ranges)
        return out * torch.sigmoid(sums - sinks.view(-1, 1)).permute(2, 0, 1).unsqueeze(-1)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return kernels.sink_attention(q, k, v, sinks, starts.to(q.device), window)

    operands = {"q": Operand(q), "k": Operand(kv), "v": Operand(kv), "sinks": Operand(q[2:3])}
    label = f"sink_attention of {type(kernels).__name__} on {q} queries and {kv} keys"
    return Work(label, operands, call, exact)


def attend_backward(kernels: Kernels, rng: Random) -> Update:
    """Gradients of an attention to some keys."""
    ranges = drawn_ranges(rng, rng.choice((1, 2, 3)), rng.choice(LENGTHS))
    q, kv = ranged_shapes(rng, ranges)
    results: list[list[Tensor]] = []

    def call(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        out, sums = exact_ranged(q.cpu().double(), k.cpu().double(), v.cpu().double(), ranges)
        given = grad, q, k, v, out.to(q.device, q.dtype), sums.float().to(q.device)
        results.append([x.cpu() for x in kernels.attend_backward(*given, ranges_on(q.device, ranges))])

    def check(before: Values, after: Values) -> None:
        q, k, v = (before[name].double().requires_grad_() for name in "qkv")
        with torch.enable_grad():
            out, _ = exact_ranged(q, k, v, ranges)
            wanted = torch.autograd.grad(out, (q, k, v), before["grad"].double())
        for name, ours, theirs in zip("qkv", results[-1], wanted, strict=True):
            assert ours.dtype == torch.float32
            compare(f"the gradient of {name}", ours, theirs, before["q"].dtype, before["grad"])

    label = f"attend_backward of {type(kernels).__name__} on {q} queries and {kv} keys"
    operands = {"grad": Operand(q), "q": Operand(q), "k": Operand(kv), "v": Operand(kv)}
    return Update(label, operands, call, check)


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


def with_sinks(ranks: Ranks, rng: Random) -> Work:
    """Attention to some keys and to a score of each head that has no value."""
    ranges = drawn_ranges(rng, rng.choice((1, 2)), rng.choice(LENGTHS))
    q, kv = ranged_shapes(rng, ranges)
    kernels = drawn_blocks(rng)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return SinkAttention.apply(q, k, v, sinks, ranges_on(q.device, ranges), kernels)  # type: ignore[no-any-return]

    def exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, sums = exact_ranged(q, k, v, ranges)
        return out * torch.sigmoid(sums - sinks.view(-1, 1)).permute(2, 0, 1).unsqueeze(-1)

    operands = {"q": Operand(q), "k": Operand(kv), "v": Operand(kv), "sinks": Operand(q[2:3])}
    return Work(f"SinkAttention on {q} and {kv}, {type(kernels).__name__}", operands, call, exact)


def gathered_context(ranks: Ranks, rng: Random) -> Work:
    """Attention of ranks that gather the keys of all."""
    return _context(ranks, rng, _Gather, "gather")


def ring_context(ranks: Ranks, rng: Random) -> Work:
    """Attention of ranks that pass their keys on."""
    return _context(ranks, rng, _Ring, "ring")


def fused_context(ranks: Ranks, rng: Random) -> Work:
    """Attention of ranks whose kernel passes their keys on."""
    return _context(ranks, rng, _FusedRing, "gather")


class _GatheringRing(RingAttention):
    """A kernel of a ring by elementary operations on the keys of all ranks."""

    def __init__(self, context: ContextParallel, ranges: KeyRanges) -> None:
        self._context, self._ranges = context, ranges

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, ranges = _gathered(k, v, ranges_on(q.device, self._ranges), self._context)
        return self._context.kernels.attend(q, keys, values, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, ranges = _gathered(k, v, ranges_on(q.device, self._ranges), self._context)
        given = keys, values, out.to(q.dtype), log_sums, ranges
        q_grad, k_grad, v_grad = self._context.kernels.attend_backward(grad, q, *given)
        by_rank = (self._context.by_rank(x.float()).contiguous() for x in (k_grad, v_grad))
        own = [self._context.comm.reduce_scatter(x, self._context.axis) for x in by_rank]
        return q_grad, own[0], own[1]


def _context(ranks: Ranks, rng: Random, function: Any, method: ContextMethod) -> Work:
    size, own, batch = ranks.axis.size, ranks.axis.rank, rng.choice((1, 2))
    layouts: tuple[CutLayout, ...] = ("contiguous", "zigzag", "striped")
    cut = SequenceCut(2 * size * rng.choice((1, 3, 40)), size, rng.choice(layouts))
    context = ContextParallel(ranks.axis, cut, method, ranks.comm, drawn_blocks(rng))
    starts, window = drawn_starts(rng, batch, cut.seq_len), rng.choice((None, 3))
    places = [context.positions_of(rank) for rank in range(size)]
    of_ranks = [KeyRanges.of(starts[:, positions], positions, window) for positions in places]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if function is _FusedRing:
            return _FusedRing.apply(q, k, v, _GatheringRing(context, of_ranks[own]))  # type: ignore[no-any-return]
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


CONTEXT_CASES: dict[type, Callable[[Ranks, Random], Work]] = {
    _Gather: gathered_context,
    _Ring: ring_context,
    _FusedRing: fused_context,
}
"""Functions of context parallel ranks."""
