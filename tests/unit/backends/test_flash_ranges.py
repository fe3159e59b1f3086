"""Attention to ranges of keys in calls of a flash kernel, next to its formula; the kernel is torch's for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nxtrain.backends import flash_ranges
from nxtrain.backends.attention_tiles import Tile, first_seen, group_into_calls, listed, tiles
from nxtrain.backends.flash_ranges import Call, failure
from nxtrain.backends.ranged_attention import RangedAttention
from nxtrain.common.kernels import KeyRanges
from nxtrain.common.sequence_cut import CutLayout, SequenceCut
from tests.support.attention_calls import CpuFlash, FlashOnCpu
from tests.support.contract_ranges import drawn_starts, exact_ranged

LAYOUTS: tuple[CutLayout, ...] = ("contiguous", "zigzag", "striped")
CASES = 120


def drawn_block(rng: Random) -> tuple[SequenceCut, int, tuple[range, ...]]:
    """A division of a sequence, a rank of it, and the keys of another rank or of all."""
    size = rng.choice((1, 2, 3, 4))
    cut = SequenceCut(2 * size * rng.randint(1, 12), size, rng.choice(LAYOUTS))
    keys: tuple[range, ...] = (range(cut.seq_len),)
    if rng.random() < 0.6:
        keys = cut.positions(rng.randrange(size))
    return cut, rng.randrange(size), keys


def visible(tile: Tile) -> np.ndarray:
    """(queries, keys) of a tile that flash kernels see; the diagonal ends in the last query and the last key."""
    diagonal = np.arange(tile.end - tile.start)[:, None] + (tile.high - tile.low) - (tile.end - tile.start)
    keys = np.arange(tile.high - tile.low)
    seen = np.ones((tile.end - tile.start, tile.high - tile.low), dtype=bool)
    if tile.causal:
        seen &= keys <= diagonal
    if tile.window is not None:
        seen &= keys >= diagonal - tile.window
    return seen


@given(st.integers(0, 1 << 30), st.sampled_from((None, 1, 2, 5, 30)), st.booleans())
def test_tiles_hold_each_pair_that_is_seen_once(seed: int, window: int | None, documents: bool) -> None:
    rng = Random(seed)
    cut, rank, theirs = drawn_block(rng)
    starts = np.zeros(cut.seq_len, dtype=np.int64)
    if documents:
        starts = drawn_starts(rng, 1, cut.seq_len)[0].numpy()
    queries, keys = listed(cut.positions(rank)), listed(theirs)
    first = first_seen(starts[queries], queries, window)
    wanted = (keys <= queries[:, None]) & (keys >= first[:, None])
    found = np.zeros(wanted.shape, dtype=np.int64)
    for tile in tiles(first, queries, keys, slides=window is not None):
        assert visible(tile).any(axis=1).all(), "kernels differ in what a query without a key gets"
        assert tile.window is None or tile.window >= 0, "-1 is not a limit"
        found[tile.start : tile.end, tile.low : tile.high] += visible(tile)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_a_row_needs_one_tile_for_each_block(layout: CutLayout) -> None:
    """The rank's own block is causal, and so are those of stripes; others are seen whole, without their later piece."""
    cut = SequenceCut(64, 4, layout)
    queries = listed(cut.positions(1))
    zeros = np.zeros_like(queries)
    found = [tiles(zeros, queries, listed(cut.positions(source))) for source in range(4)]
    wanted = {
        "contiguous": [[(0, 16, 0, 16, False)], [(0, 16, 0, 16, True)], [], []],
        "zigzag": [[(0, 16, 0, 8, False)], [(0, 16, 0, 16, True)], [(8, 16, 0, 16, False)], [(8, 16, 0, 16, False)]],
        "striped": [[(0, 16, 0, 16, True)]] * 2 + [[(1, 16, 0, 15, True)]] * 2,
    }
    assert [[tuple(tile[:5]) for tile in own] for own in found] == wanted[layout]
    assert all(tile.window is None for own in found for tile in own)


@given(st.integers(0, 1 << 30), st.sampled_from((None, 3)))
def test_tiles_of_a_call_have_no_key_in_common(seed: int, window: int | None) -> None:
    rng = Random(seed)
    cut, rank, theirs = drawn_block(rng)
    queries = listed(cut.positions(rank))
    rows = [first_seen(row[queries], queries, window) for row in drawn_starts(rng, 3, cut.seq_len).numpy()]
    by_sequence = [tiles(row, queries, listed(theirs), slides=window is not None) for row in rows]
    calls = group_into_calls(by_sequence)
    members = [member for _, found in calls for member in found]
    assert sorted(members, key=str) == sorted(((row, x) for row, own in enumerate(by_sequence) for x in own), key=str)
    for shape, found in calls:
        assert {(tile.causal, tile.window) for _, tile in found} == {shape}
        keys = [(row, key) for row, tile in found for key in range(tile.low, tile.high)]
        assert len(keys) == len(set(keys))


Drawn = tuple[list[Tensor], KeyRanges]


def drawn(rng: Random) -> Drawn:
    """Queries, keys and values of some sequences, and the ranges of the queries among the keys."""
    cut, rank, theirs = drawn_block(rng)
    batch, kv_heads, repeats = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    own = torch.from_numpy(listed(cut.positions(rank)))
    keys = torch.from_numpy(listed(theirs))
    starts = None
    if rng.random() < 0.7:
        starts = drawn_starts(rng, batch, cut.seq_len)[:, own]
    ranges = KeyRanges.of(starts, own, rng.choice((None, None, 1, rng.randint(1, 40))))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shapes = [(len(own), batch, kv_heads * repeats, 8), *[(len(keys), batch, kv_heads, 8)] * 2]
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    return operands, replace(ranges, keys=keys, known=(cut.positions(rank), theirs))


def errors(case: Drawn, kernels: FlashOnCpu) -> float:
    """Largest error of the output, of the sums and of the gradients, next to the formula in float64."""
    operands, ranges = case
    narrow = [x.clone().requires_grad_() for x in operands]
    wide = [x.double().requires_grad_() for x in operands]
    whole = replace(ranges, first=ranges.first.expand(operands[0].shape[1], -1))
    out: Tensor = RangedAttention.apply(*narrow, ranges, kernels)
    wanted, wanted_sums = exact_ranged(wide[0], wide[1], wide[2], whole)
    _, sums = kernels.attend(operands[0], operands[1], operands[2], ranges)
    assert torch.equal(sums.isinf(), wanted_sums.isinf())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    pairs = [(out, wanted), (sums.nan_to_num(neginf=0), wanted_sums.nan_to_num(neginf=0))]
    ours, theirs = torch.autograd.grad(out, narrow, grad), torch.autograd.grad(wanted, wide, grad.double())
    return max(float((x - y).detach().abs().max()) for x, y in [*pairs, *zip(ours, theirs, strict=True)])


@pytest.mark.parametrize("seed", range(4))
def test_calls_compute_the_attention_of_the_formula_and_its_gradients(seed: int) -> None:
    rng = Random(seed)
    assert max(errors(drawn(rng), FlashOnCpu()) for _ in range(CASES // 4)) < 2e-5


@contextmanager
def _first_tile_left_out() -> Iterator[None]:
    with (
        patch.object(flash_ranges, "group_into_calls", lambda found: group_into_calls([own[1:] for own in found])),
        patch.object(flash_ranges, "undivided_tiles", lambda *_: ()),
    ):
        yield


@contextmanager
def _sums_of_the_call_alone() -> Iterator[None]:
    """The log-sums of a call's keys in its backward pass, in place of those of all keys."""
    sound = CpuFlash.backward

    def backward(self: CpuFlash, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, _, call = given
        return sound(self, grad, q, k, v, out, self.forward(q, k, v, call)[1], call)

    with patch.object(CpuFlash, "backward", backward):
        yield


@contextmanager
def _last_part_of_a_gradient_alone() -> Iterator[None]:
    with patch.object(flash_ranges._Rows, "add", flash_ranges._Rows.put):
        yield


@contextmanager
def _diagonal_at_the_first_key() -> Iterator[None]:
    """Diagonals that begin at the first query and the first key, as those of torch's public attention."""
    sound = CpuFlash.forward

    def forward(self: CpuFlash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if call.offsets is None and call.mask.causal and k.shape[1] > q.shape[1]:
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        return sound(self, q, k, v, call)

    with patch.object(CpuFlash, "forward", forward):
        yield


def parts_of_keys(rng: Random) -> float:
    """Largest error of gradients, where each half of the keys has a backward pass with the sums of all."""
    operands, ranges = drawn(rng)
    length = len(operands[0])
    pieces = (range(length),)
    ranges = KeyRanges.of(None, torch.arange(length))
    ranges = replace(ranges, known=(pieces, pieces))
    q = operands[0]
    k, v = (x[:length] if len(x) >= length else x[:1].expand(length, -1, -1, -1) for x in operands[1:])
    kernels = FlashOnCpu()
    out, sums = kernels.attend(q, k, v, ranges)
    whole = kernels.attend_backward(q, q, k, v, out, sums, ranges)
    half = length // 2
    totals = [torch.zeros_like(x) for x in (q, k, v)]
    for part in (slice(0, half), slice(half, length)):
        of_part = replace(ranges, keys=ranges.keys[part], known=(pieces, (range(part.start, part.stop),)))
        q_part, *parts = kernels.attend_backward(q, q, k[part], v[part], out, sums, of_part)
        totals[0] += q_part
        for total, own in zip(totals[1:], parts, strict=True):
            total[part] += own
    return max(float((x - y).abs().max()) for x, y in zip(totals, whole, strict=True))


def test_gradients_of_parts_of_the_keys_add_up() -> None:
    assert max(parts_of_keys(Random(seed)) for seed in range(10)) < 2e-5


def drawn_errors() -> float:
    rng = Random(0)
    return max(errors(drawn(rng), FlashOnCpu()) for _ in range(CASES // 4))


@pytest.mark.parametrize(
    ("mutant", "measured"),
    [
        (_first_tile_left_out, drawn_errors),
        (_last_part_of_a_gradient_alone, drawn_errors),
        (_diagonal_at_the_first_key, drawn_errors),
        (_sums_of_the_call_alone, lambda: max(parts_of_keys(Random(seed)) for seed in range(10))),
    ],
)
def test_a_mutant_fails(mutant: Callable[[], Any], measured: Callable[[], float]) -> None:
    with mutant():
        try:
            error = measured()
        except AssertionError:  # sums that should not be infinite
            return
    assert error > 1e-3


def test_offsets_are_made_once_for_an_upload_from_the_host_copy() -> None:
    """Later blocks and micro-batches ask neither the device nor the host for them."""
    kernels, positions = FlashOnCpu(), torch.arange(12)
    starts, host = torch.tensor([[0] * 5 + [5] * 7]), torch.tensor([[0] * 5 + [5] * 7])
    ranges = replace(KeyRanges.of(starts, positions), known=((range(12),), (range(12),)))
    kernels.ranges.copies[starts] = host
    with patch.object(Tensor, "cpu", side_effect=AssertionError("the device is not read")):
        (call,) = kernels.ranges.calls(ranges)
    assert call.offsets is not None
    assert call.offsets[0].tolist() == call.offsets[1].tolist() == [0, 5, 12]
    assert (call.queries, call.keys, call.longest) == (None, None, (7, 7))
    assert kernels.ranges.calls(ranges)[0] is call
    for other in (2, 3):
        assert kernels.ranges.calls(replace(ranges, window=other))[0] is not call
    del starts, ranges
    assert not len(kernels.ranges.copies), "the copy goes with the upload"


def test_a_trial_finds_a_kernel_that_is_wrong() -> None:
    tried = FlashOnCpu().ranges, torch.device("cpu"), torch.bfloat16, 16
    assert failure(*tried) == ""
    with _diagonal_at_the_first_key():
        assert "of the formula's" in failure(*tried)
    with patch.object(CpuFlash, "forward", side_effect=RuntimeError("no kernel image\nmore")):
        assert failure(*tried) == "RuntimeError: no kernel image"
