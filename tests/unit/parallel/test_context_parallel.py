"""Division of sequences between ranks, and attention to ranges of keys in parts, next to one softmax in float64."""

from __future__ import annotations

import math
from itertools import chain, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nxtrain.backends import ranged_attention
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.limits import block_rows
from nxtrain.backends.ranged_attention import RangedAttention, whole_rows
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sequence_cut import CutLayout, SequenceCut
from nxtrain.parallel.context_parallel import ContextParallel, _joined, visible_hops
from tests.support.contract_functions import Echo

LAYOUTS: tuple[CutLayout, ...] = ("contiguous", "zigzag", "striped")
KERNELS: tuple[Kernels, ...] = (CpuKernels(), PlainKernels())


def context(size: int, layout: CutLayout, seq_len: int, rank: int = 0) -> ContextParallel:
    axis = Mesh.build(size, rank, cp=size).cp
    return ContextParallel(axis, SequenceCut(seq_len, size, layout), "gather", Echo(), PlainKernels())


@given(st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 9))
def test_every_position_is_of_one_rank_and_ascends(layout: CutLayout, size: int, pieces: int) -> None:
    cut = SequenceCut(2 * size * pieces, size, layout)
    by_rank = [list(chain(*cut.positions(rank))) for rank in range(size)]
    assert sorted(chain(*by_rank)) == list(range(cut.seq_len))
    assert {len(positions) for positions in by_rank} == {2 * pieces}
    assert all(positions == sorted(positions) for positions in by_rank)
    assert by_rank[cut.rank_of_last][-1] == cut.seq_len - 1


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_and_stripes_balance_the_work_and_pieces_do_not(size: int) -> None:
    seq_len = 128 * size

    def imbalance(layout: CutLayout) -> float:
        pairs = [SequenceCut(seq_len, size, layout).pairs(rank) for rank in range(size)]
        assert sum(pairs) == seq_len * (seq_len + 1) // 2
        return max(pairs) / min(pairs) - 1

    assert imbalance("zigzag") == 0
    assert imbalance("striped") < 0.05
    assert imbalance("contiguous") > 1


@given(st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(1, 7), st.integers(1, 80))
def test_pairs_of_a_window_are_those_counted_one_by_one(layout: CutLayout, size: int, pieces: int, window: int) -> None:
    cut = SequenceCut(2 * size * pieces, size, layout)
    for rank in range(size):
        assert cut.pairs(rank, window) == sum(min(position + 1, window) for position in cut.listed(rank))
        assert cut.pairs(rank) == sum(position + 1 for position in cut.listed(rank))


@given(st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1 << 30), st.floats(0, 1))
def test_a_ring_visits_the_ranks_whose_documents_and_windows_reach_a_block(
    layout: CutLayout, size: int, pieces: int, seed: int, share: float
) -> None:
    rng = Random(seed)
    cut = SequenceCut(2 * size * pieces, size, layout)
    starts = torch.tensor([drawn_starts(rng, cut.seq_len, share) for _ in range(rng.randint(1, 3))])
    for window, documents in product((None, rng.randint(1, 60)), (None, starts)):
        rows = [[0] * cut.seq_len] if documents is None else documents.tolist()

        def sees(rank: int, source: int, rows: list[list[int]] = rows, window: int | None = window) -> bool:
            pairs = product(cut.listed(rank), cut.listed(source), rows)
            return any(max(row[q], q - (window or 100) + 1) <= key <= q for q, key, row in pairs)

        needed = {hop for hop in range(size) for rank in range(size) if sees(rank, (rank - hop) % size)}
        assert visible_hops(cut, window, documents) == tuple(sorted(needed))


def drawn_starts(rng: Random, length: int, share: float) -> list[int]:
    """First positions of the documents of a row, of which such a share of positions begins one."""
    row = [0]
    for position in range(1, length):
        row.append(position if rng.random() < share else row[-1])
    return row


def test_auto_takes_stripes_for_lengths_without_pairs_of_pieces() -> None:
    assert [SequenceCut.of(length, 2, "auto").layout for length in (8, 10)] == ["zigzag", "striped"]


@given(st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 6), st.data())
def test_positions_of_another_rank_follow_from_the_own_ones(
    layout: CutLayout, size: int, pieces: int, data: st.DataObject
) -> None:
    rank, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    result = context(size, layout, 2 * size * pieces, rank)
    assert torch.equal(result.moved(result.positions, other), result.positions_of(other))


class Recorder(Echo):
    """Notes the order of transfers and of work; every rank has the same keys."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        number = sum(event.startswith("send") for event in self.events)
        self.events.append(f"send {number}")
        comm = self

        class Arriving:
            def wait(self) -> Tensor:
                comm.events.append(f"wait {number}")
                return x

        return Arriving()


def test_a_ring_works_while_the_next_block_is_under_way() -> None:
    """In forward, and in backward, where the gradient of a block travels during the work on the next block."""
    comm, work = Recorder(), PlainKernels()
    axis = Mesh.build(3, 2, cp=3).cp
    ring = ContextParallel(axis, SequenceCut(12, 3, "zigzag"), "ring", comm, work)

    def noted(name: str) -> Any:
        sound = getattr(PlainKernels, name)

        def note(*args: Any) -> Any:
            comm.events.append(name)
            return sound(*args)

        return note

    q, k, v = (torch.randn(4, 1, 2, 4, requires_grad=True) for _ in "qkv")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend", "attend_backward"):
            patch.setattr(PlainKernels, name, noted(name))
        out = ring.attention(q, k, v, ring.positions, None)
        forward = comm.events.copy()
        comm.events.clear()
        out.sum().backward()
    assert forward == ["send 0", "attend", "wait 0", "send 1", "attend", "wait 1", "attend"]
    assert comm.events == [
        *("send 0", "attend_backward", "send 1", "wait 0"),
        *("send 2", "attend_backward", "wait 1", "send 3", "wait 2"),
        *("attend_backward", "wait 3", "send 4", "wait 4"),
    ]


@given(st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(1, 6))
def test_gathered_rows_are_put_in_order_and_back(layout: CutLayout, size: int, pieces: int) -> None:
    result = context(size, layout, 2 * size * pieces)
    gathered = torch.cat([result.positions_of(rank) for rank in range(size)])
    rows = gathered[:, None].expand(-1, 3).contiguous()
    assert torch.equal(result.in_order(rows)[:, 0], torch.arange(len(gathered)))
    assert torch.equal(result.by_rank(result.in_order(rows)), rows)


def exact(q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> Tensor:
    """Attention by one softmax over all keys; zeros for a query that sees none."""
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("qbnh,kbnh->bnqk", q, keys) / math.sqrt(q.shape[3])
    visible = (ranges.keys <= ranges.last[:, None]) & (ranges.keys >= ranges.first[..., None])
    scores = scores.masked_fill(~visible[:, None], -1e300)
    weights = scores.softmax(-1) * visible[:, None]
    return torch.einsum("bnqk,kbnh->qbnh", weights, values)


def drawn(rng: Random) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, int | None]:
    """Queries, keys and values of a whole row, first positions of its documents, and perhaps a window."""
    length, batch, kv_heads, repeats = rng.randint(1, 40), rng.randint(1, 3), rng.choice((1, 2)), rng.choice((1, 3))
    width = rng.choice((1, 5, 8))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    q = torch.randn(length, batch, kv_heads * repeats, width, generator=generator)
    k, v = (torch.randn(length, batch, kv_heads, width, generator=generator) for _ in "kv")
    starts = torch.zeros(batch, length, dtype=torch.int64)
    for row in starts:
        for position in range(1, length):
            begins = rng.random() < 0.2
            row[position] = position if begins else row[position - 1]
    return (q, k, v), starts, rng.choice((None, 1, rng.randint(1, 50)))


@given(st.integers(0, 1 << 30), st.sampled_from(KERNELS), st.sampled_from((1, 4, 64)))
def test_blocks_of_queries_compute_one_softmax_and_its_gradient(seed: int, kernels: Kernels, rows: int) -> None:
    operands, starts, window = drawn(Random(seed))
    ranges = whole_rows(operands[0], starts, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged_attention, "block_rows", lambda heads, num_keys: rows)
        check(kernels, operands, ranges)


def check(kernels: Kernels, operands: tuple[Tensor, Tensor, Tensor], ranges: KeyRanges) -> None:
    narrow = [x.clone().requires_grad_() for x in operands]
    wide = [x.double().requires_grad_() for x in operands]
    out: Tensor = RangedAttention.apply(*narrow, ranges, kernels)
    want = exact(wide[0], wide[1], wide[2], ranges)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    want.backward(grad.double())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 1 << 30), st.sampled_from(KERNELS), st.integers(1, 4))
def test_blocks_of_keys_join_to_the_attention_to_all_and_their_gradients_add_up(
    seed: int, kernels: Kernels, number: int
) -> None:
    """Some blocks are empty, and some queries see nothing of a block or of any."""
    rng = Random(seed)
    (q, k, v), starts, window = drawn(rng)
    whole = whole_rows(q, starts, window)
    out = torch.zeros(q.shape)
    sums = torch.full((q.shape[1], q.shape[2], q.shape[0]), float("-inf"))
    chosen = [torch.tensor(sorted(rng.sample(range(len(k)), rng.randint(0, len(k)))), dtype=torch.int64)]
    left = torch.tensor([key for key in range(len(k)) if key not in set(chosen[0].tolist())], dtype=torch.int64)
    parts = [*left.chunk(number), chosen[0]]
    for part in parts:
        ranges = KeyRanges(whole.first, whole.last, part)
        out, sums = _joined(out, sums, *kernels.attend(q, k[part], v[part], ranges))
    want, want_sums = kernels.attend(q, k, v, whole)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, want_sums, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    wanted = kernels.attend_backward(grad, q, k, v, want, want_sums, whole)
    totals = [torch.zeros_like(x) for x in wanted]
    for part in parts:
        ranges = KeyRanges(whole.first, whole.last, part)
        q_part, k_part, v_part = kernels.attend_backward(grad, q, k[part], v[part], out, sums, ranges)
        totals[0] += q_part
        totals[1][part] += k_part
        totals[2][part] += v_part
    for total, theirs in zip(totals, wanted, strict=True):
        torch.testing.assert_close(total, theirs, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_no_key_has_an_output_of_zeros_and_no_gradient() -> None:
    q, k, v = torch.randn(3, 1, 2, 1, 4).unbind()
    ranges = KeyRanges(torch.tensor([[0, 0]]), torch.tensor([0, 1]), torch.tensor([1, 2]))
    for kernels in KERNELS:
        out, sums = kernels.attend(q, k, v, ranges)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert sums[0, 0].tolist()[0] == float("-inf")
        grads = kernels.attend_backward(torch.ones_like(out), q, k, v, out, sums, ranges)
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert not grads[0][0].any()


def test_the_scores_of_a_block_stay_within_a_limit() -> None:
    assert block_rows(heads=8, num_keys=1 << 20) == 16
    assert block_rows(heads=8, num_keys=8192) * 8 * 8192 * 4 <= 64 << 20
    assert block_rows(heads=1, num_keys=10) == 512
