"""Attention whose blocks are rounds of loops computes one softmax, in a graph that does not grow with the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends import ranged_attention
from nxtrain.backends.base import Backend
from nxtrain.backends.ranged_attention import RangedAttention, whole_rows
from nxtrain.backends.xla import looped_attention
from nxtrain.backends.xla.loops import Offset
from nxtrain.common.kernels import KeyRanges
from tests.support.contract_ranges import drawn_starts, exact_ranged, ranges_on
from tests.support.xla_bodies import Counts, attention_graphs
from tests.support.xla_engine import run_devices

WINDOWS = (5, None, 1, 200)
"""Keys that a query of each draw sees. Only a graph without a window has several loops, and takes long to compile."""

NUM_STEPS = 3
ROWS = 8
"""Queries of a block, so that short rows have many."""

TOLERANCE = 1e-5


def drawn(rng: Random, window: int | None) -> tuple[list[Tensor], KeyRanges]:
    """Queries, keys, values and the gradient of the output, and ranges inside of documents and a window."""
    length, batch, kv_heads = rng.randint(4 * ROWS + 1, 120), rng.choice((1, 2)), rng.choice((1, 2))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    heads = kv_heads * rng.choice((1, 3))
    sizes = (heads, kv_heads, kv_heads, heads)
    tensors = [torch.randn(length, batch, number, 4, generator=generator) for number in sizes]
    starts = drawn_starts(rng, batch, length) if window != 1 else None
    ranges = whole_rows(tensors[0], starts, window)
    if window == 200:  # ranks share the graph
        ranges = replace(ranges, known=None)
    return tensors, ranges


def largest_errors(backend: Backend, windows: Sequence[int | None], mutant: str = "") -> list[tuple[str, float, int]]:
    """Largest error of output and gradients of each draw, with its label, and graphs after the first step."""
    for module in (ranged_attention, looped_attention):
        vars(module)["block_rows"] = lambda heads, num_keys: ROWS
    vars(looped_attention)["XLA_LOOPS"] = 2
    if mutant:
        spoil(mutant)
    found = []
    for draw, window in enumerate(windows):
        tensors, ranges = drawn(Random(draw), window)
        grad, on_device = tensors.pop(), ranges_on(backend.device, ranges)
        wide = [x.double().requires_grad_() for x in tensors]
        want, _ = exact_ranged(wide[0], wide[1], wide[2], ranges)
        wanted = [want, *torch.autograd.grad(want, wide, grad.double())]
        counts = Counts.now()
        for step in range(NUM_STEPS):
            narrow = [backend.put(x).requires_grad_() for x in tensors]

            def attend(*operands: Tensor, ranges: KeyRanges = on_device) -> Tensor:
                return RangedAttention.apply(*operands, ranges, backend.kernels)  # type: ignore[no-any-return]

            out = backend.kernels.recompute(attend, *narrow) if window == 1 else attend(*narrow)
            out.backward(backend.put(grad))
            backend.step_boundary()
            if step == 0:
                counts = Counts.now()
        results = [out.detach(), *(x.grad for x in narrow if x.grad is not None)]
        errors = [float((ours.cpu() - theirs).abs().max()) for ours, theirs in zip(results, wanted, strict=True)]
        label = f"{draw}: {tuple(tensors[0].shape)}, window {window}"
        assert not [name for name in Counts.now().fallbacks if "scalar" not in name], "nothing goes through the host"
        found.append((label, max(errors), Counts.now().compiled - counts.compiled))
    return found


def spoil(mutant: str) -> None:
    """Break the loops of this process."""
    loops: Any = looped_attention._loops
    if mutant == "keys from one too late":

        def shifted(*args: Any) -> Any:
            for loop in loops(*args):
                yield loop._replace(low=Offset(loop.low.first + 1, loop.low.step))

        vars(looped_attention)["_loops"] = shifted
    elif mutant == "a stale block":
        loop_slices = vars(looped_attention)
        whole = loop_slices["sliced"]
        loop_slices["sliced"] = lambda x, dim, start, size: whole(x, dim, start * (dim != 2), size)
    else:

        def shorter(*args: Any) -> Any:
            for loop in loops(*args):
                yield loop._replace(width=loop.width - 1)

        vars(looped_attention)["_loops"] = shorter


def test_loops_compute_one_softmax_and_its_gradients(tmp_path: Path) -> None:
    for found in run_devices(2, largest_errors, WINDOWS, folder=tmp_path):
        assert {compiled for _, _, compiled in found} == {0}, "later steps have the graph of the first"
        assert all(error < TOLERANCE for _, error, _ in found), found


@pytest.mark.parametrize("mutant", ["keys from one too late", "a stale block", "one key too few"])
def test_a_wrong_bound_and_a_stale_block_are_noticed(mutant: str, tmp_path: Path) -> None:
    (found,) = run_devices(1, largest_errors, WINDOWS[:1], mutant, folder=tmp_path)
    assert max(error for _, error, _ in found) > 100 * TOLERANCE


def instructions(texts: dict[str, str]) -> dict[str, int]:
    return {label: text.count(" = ") for label, text in texts.items()}


def test_the_graph_does_not_grow_with_the_sequence_and_is_that_of_all_ranks(tmp_path: Path) -> None:
    (short,) = run_devices(1, attention_graphs, 8192, 0, folder=tmp_path)
    (long,) = run_devices(1, attention_graphs, 65536, 1, folder=tmp_path)
    assert instructions(short) == instructions(long)
    assert all(0 < text.count(" while(") <= 8 for text in long.values())
    assert max(instructions(long).values()) < 2500
    (other,) = run_devices(1, attention_graphs, 65536, 0, folder=tmp_path)
    assert long == other
