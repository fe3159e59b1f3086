"""CPU benchmark of attention within packed documents: time and memory as functions of the sequence length.

Three implementations are compared: blocked attention, one mask over all scores, and one call per document. Each
measurement is one forward and backward pass over one sequence. The figures are the CPU time of this process, and the
peak of bytes in live tensors. A figure that grows as a power of the length is summarized by that exponent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import linear_regression
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_attention import repeat_heads
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.tools.bench import harness
from nxtrain.tools.trace.fake_rank import LiveBytes

HEADS = 2
KV_HEADS = 1
HEAD_SIZE = 64
DOCUMENT = 1000
"""Tokens of a document in the benchmark's sequences."""

SHORTEST = 1024
LONGEST_MASK = 16384
"""Longest sequence, in tokens, for which the masked implementation runs; its memory grows with the square."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Compute `Kernels.document_attention` by torch's attention with a mask over all pairs of positions."""
    repeats, length = q.shape[2] // k.shape[2], q.shape[0]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (repeat_heads(x, repeats) for x in (k, v))
    positions = torch.arange(length)
    visible = (positions <= positions[:, None]) & (positions >= starts[:, :, None])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
    return out.permute(2, 0, 1, 3)


SIDES: dict[str, Attention] = {
    "blocked": PlainKernels().document_attention,
    "mask": masked_attention,
    "per-document": CpuKernels().document_attention,
}
"""Attention implementations by name.

`blocked` is for devices whose document boundaries the host does not read. `mask` masks all scores. `per-document` is
the CPU kernel.
"""


def bench_attention(*, longest: int, rounds: int, threads: int, as_json: bool) -> None:
    """Measure time and memory of each attention implementation over doubling sequence lengths, and print the exponents.

    Args:
        longest: Longest sequence in tokens; at least `2 * SHORTEST`.
        rounds: Measurements of each implementation at each length. Implementations alternate.
        threads: Number of CPU threads; 0: all cores.
    """
    if threads:
        torch.set_num_threads(threads)
    lengths = [SHORTEST << power for power in range(int(math.log2(longest / SHORTEST)) + 1)]
    rows, points = list[dict[str, Any]](), list[tuple[str, int, float, int]]()
    for length in lengths:
        given = _inputs(length)
        sides = {name: side for name, side in SIDES.items() if name != "mask" or length <= LONGEST_MASK}
        turns = {name: partial(harness.cpu_s, partial(_pass, side, given)) for name, side in sides.items()}
        seconds = harness.take_turns(turns, rounds, warm_up=0, label=f"{length:,} tokens, ")
        for name, side in sides.items():
            with LiveBytes(list(given)) as live:
                _pass(side, given)
            rows.append(harness.row(f"{name} {length}", "s", seconds[name], peak_bytes=live.peak))
            points.append((name, length, rows[-1]["value"], live.peak))
    powers = {}
    for name in SIDES:
        powers[name] = exponents([point[1:] for point in points if point[0] == name])
    result = {"machine": harness.machine(), "threads": torch.get_num_threads(), "rows": rows, "exponents": powers}
    harness.present(result, lambda: _shown(result, points), as_json=as_json)


def exponents(points: Sequence[tuple[int, float, int]]) -> dict[str, float]:
    """Exponents of time and memory as powers of the sequence length.

    They are fitted by least squares on the logarithms, over the longer half of the lengths.

    Args:
        points: Length in tokens, seconds and peak bytes of each measurement.
    """
    longer = points[len(points) // 2 - 1 :]
    lengths = [math.log(length) for length, _, _ in longer]
    return {
        "time": linear_regression(lengths, [math.log(seconds) for _, seconds, _ in longer]).slope,
        "memory": linear_regression(lengths, [math.log(size) for _, _, size in longer]).slope,
    }


def _inputs(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, 1, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    positions = torch.arange(length)
    return q, k, v, (positions - positions % DOCUMENT).unsqueeze(0)


def _pass(side: Attention, given: Sequence[Tensor]) -> None:
    q, k, v, starts = given
    out = side(q, k, v, starts)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def _shown(result: Mapping[str, Any], points: Sequence[tuple[str, int, float, int]]) -> list[Any]:
    cells = [(name, f"{length:,}", f"{s * 1e3:,.0f}", f"{peak / 2**20:,.0f}") for name, length, s, peak in points]
    lines = [
        f"{name}: time grows as S^{powers['time']:.2f}, memory as S^{powers['memory']:.2f}"
        for name, powers in result["exponents"].items()
    ]
    title = f"attention of one row, {HEADS} heads of {HEAD_SIZE}, documents of {DOCUMENT} tokens"
    caption = f"processor time of {result['threads']} threads, forward and backward"
    return [harness.table(title, ("attention", "S", "ms", "MiB"), cells, caption), *lines]
