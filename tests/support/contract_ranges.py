"""Cases of `tests.support.contract` for attention to ranges of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from nxtrain.common.kernels import Kernels, KeyRanges
from tests.support.contract import Operand, Shape, Update, compare

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
    found: list[tuple[Tensor, Tensor]] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        out, sums = kernels.attend(q, k, v, ranges_on(q.device, ranges))
        found.append((out.cpu(), sums.cpu()))

    def check(before: Values, after: Values) -> None:
        q, k, v = (before[name].double() for name in "qkv")
        wanted, sums = exact_ranged(q, k, v, ranges)
        assert {x.dtype for x in found[-1]} == {torch.float32}
        compare("the output", found[-1][0], wanted, before["q"].dtype)
        assert torch.equal(found[-1][1].isinf(), sums.isinf())
        ours, theirs = (x.masked_fill(x.isinf(), 0.0) for x in (found[-1][1], sums))
        compare("the sums", ours, theirs, before["q"].dtype)

    label = f"attend of {type(kernels).__name__} on {q} queries and {kv} keys"
    return Update(label, {"q": Operand(q), "k": Operand(kv), "v": Operand(kv)}, call, check)


def attend_backward(kernels: Kernels, rng: Random) -> Update:
    """Gradients of an attention to some keys."""
    ranges = drawn_ranges(rng, rng.choice((1, 2, 3)), rng.choice(LENGTHS))
    q, kv = ranged_shapes(rng, ranges)
    found: list[list[Tensor]] = []

    def call(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        out, sums = exact_ranged(q.cpu().double(), k.cpu().double(), v.cpu().double(), ranges)
        given = grad, q, k, v, out.to(q.device, q.dtype), sums.float().to(q.device)
        found.append([x.cpu() for x in kernels.attend_backward(*given, ranges_on(q.device, ranges))])

    def check(before: Values, after: Values) -> None:
        q, k, v = (before[name].double().requires_grad_() for name in "qkv")
        with torch.enable_grad():
            out, _ = exact_ranged(q, k, v, ranges)
            wanted = torch.autograd.grad(out, (q, k, v), before["grad"].double())
        for name, ours, theirs in zip("qkv", found[-1], wanted, strict=True):
            assert ours.dtype == torch.float32
            compare(f"the gradient of {name}", ours, theirs, before["q"].dtype, before["grad"])

    label = f"attend_backward of {type(kernels).__name__} on {q} queries and {kv} keys"
    operands = {"grad": Operand(q), "q": Operand(q), "k": Operand(kv), "v": Operand(kv)}
    return Update(label, operands, call, check)
