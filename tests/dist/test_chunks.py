"""Feed-forwards in chunks of the sequence on several ranks: parity with transformers and PEFT, no more transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.nn import remat
from nxtrain.nn.mlp import GatedMLP
from nxtrain.parallel.regions import TensorParallel
from tests.dist.test_remat import started
from tests.support.drawn import SEED, Drawn, draw, one_in
from tests.support.drawn_runs import check_drawn, error_of, failures, first_weights, ours, wanted
from tests.support.layouts import Degrees
from tests.support.lora import all_weights, draw_adapters, draw_quantized, wanted_of_peft, with_keys
from tests.support.memory import returns_pages, rise_bytes
from tests.support.models import our_model, weights_of
from tests.support.parity import Course, layout
from tests.support.ranks import RankPool

LAYOUTS = [
    Degrees(tp=2, sequence_parallel=True),
    Degrees(tp=2, dp=2, shard="zero1"),
    Degrees(dp=2, shard="full"),
    Degrees(tp=2, cp=2, cp_layout="zigzag", cp_method="ring", sequence_parallel=True),
    Degrees(pp=2, tp=2, sequence_parallel=True),
    Degrees(pp=2, schedule="zero_bubble"),
    Degrees(dp=2, shard="grad_op"),
    Degrees(cp=3, cp_layout="striped", cp_method="gather"),
]
CHUNKS = 3


def run_in_chunks(backend: Backend, drawn: Drawn, weights: dict[str, Tensor], broken: str = "") -> tuple[Course, int]:
    """The course of a rank whose feed-forwards take a third of its positions at a time, and the number of such."""
    longest = max(1, drawn.resolved.config.train.seq_len // (drawn.degrees.cp * CHUNKS))
    counted: Callable[..., Tensor] = GatedMLP.in_chunks
    with (
        mock.patch.object(remat, "LONG_SEQUENCE", longest),
        mock.patch.object(GatedMLP, "in_chunks", autospec=True, side_effect=counted) as calls,
        mock.patch.object(TensorParallel, *MUTANTS[broken]),
    ):
        return ours(backend, drawn, weights), calls.call_count


def _unsummed(self: TensorParallel, x: Tensor) -> Tensor:
    return x.chunk(self.axis.size)[self.axis.rank] if self.sequence_parallel else x


def _of_this_rank(self: TensorParallel, x: Tensor) -> Tensor:
    return torch.cat([x] * self.axis.size) if self.sequence_parallel else x


MUTANTS: Mapping[str, tuple[str, Any]] = {
    "": ("exit", TensorParallel.exit),
    "no sum over the ranks": ("exit", _unsummed),
    "nothing is gathered": ("whole", _of_this_rank),
}


@pytest.mark.parametrize("index", one_in(2, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_in_chunks_equals_transformers(ranks: RankPool, index: int) -> None:
    policy = ("selective", "full")[index // 2 % 2]
    run = with_keys(draw("chunks", SEED, index, LAYOUTS[index]), train__remat=policy)  # type: ignore[arg-type]
    actual = ranks.run(run.degrees.world, run_in_chunks, run, first_weights(run))
    check_drawn([course for course, _ in actual], wanted(run), run)
    has_chunks = run.degrees.schedule != "zero_bubble" and run.resolved.config.train.seq_len > run.degrees.cp
    assert all(bool(calls) == has_chunks for _, calls in actual)


@pytest.mark.parametrize("broken", [name for name in MUTANTS if name])
def test_a_run_without_a_transfer_would_be_noticed(ranks: RankPool, broken: str) -> None:
    run = with_keys(draw("chunks", SEED, 0, LAYOUTS[0]), train__remat="selective")  # type: ignore[arg-type]
    actual = ranks.run(run.degrees.world, run_in_chunks, run, first_weights(run), broken)
    assert failures([(run, error_of([course for course, _ in actual], wanted(run), run))])


def test_a_drawn_run_above_quantized_weights_equals_peft(ranks: RankPool) -> None:
    run = with_keys(draw_quantized("chunks", SEED, 0, LAYOUTS[0]), train__remat="full")
    result = ranks.run(run.degrees.world, run_in_chunks, run, all_weights(run))
    check_drawn([course for course, _ in result], wanted_of_peft(run), run)
    assert all(calls for _, calls in result)


@pytest.mark.parametrize("index", one_in(2, range(4)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_of_adapters_in_chunks_equals_peft(ranks: RankPool, index: int) -> None:
    run = with_keys(draw_adapters("chunks", SEED, index, LAYOUTS[index]), train__remat="selective")
    result = ranks.run(run.degrees.world, run_in_chunks, run, all_weights(run))
    check_drawn([course for course, _ in result], wanted_of_peft(run), run)
    assert all(calls for _, calls in result)


def peaks_of_feed_forward(backend: Backend, lengths: Sequence[int]) -> list[int]:
    """Rise of resident memory in the passes of a feed-forward, by the tokens of a row."""
    returns_pages()
    resolved = layout("gqa2", tp=1, micro=1, config={"hidden_size": 16, "intermediate_size": 512})
    model = our_model(resolved, backend, Mesh.build(1, 0), weights_of(resolved))
    (mlp, *_) = (module for module in model.modules() if isinstance(module, GatedMLP))
    peaks = []
    with mock.patch.object(remat, "LONG_SEQUENCE", CHUNK):
        remat.recompute_parts(mlp, "selective", CHUNK, backend.kernels.recompute)
        for length in lengths:
            x = torch.ones(length, 1, 16, requires_grad=True)
            peaks.append(rise_bytes(lambda x=x: mlp(x).sum().backward()))  # type: ignore[misc]
    return peaks


CHUNK = 2048
"""Positions of a chunk, small beside the rows of the test of memory."""


def test_memory_grows_with_the_stream_of_a_row_and_not_with_its_feed_forward() -> None:
    pool = RankPool()  # of new processes, whose heaps are empty
    lengths = [CHUNK, *(CHUNK * factor for factor in (1, 4, 16))]
    try:
        ((_, one, four, sixteen),) = pool.run(1, peaks_of_feed_forward, lengths)
    finally:
        pool.close()
    gate_up_bytes = 2 * 512 * 4  # per token
    stream_bytes = 16 * 4
    assert one > CHUNK * gate_up_bytes
    for peak, longer in ((four, 4), (sixteen, 16)):
        grown = (peak - one) / (CHUNK * (longer - 1))
        assert grown < 8 * stream_bytes < gate_up_bytes / 2, (longer, grown)


def started_in_chunks(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> dict[str, int]:
    with mock.patch.object(remat, "LONG_SEQUENCE", resolved.config.train.seq_len // CHUNKS):
        return started(backend, resolved, weights)


@pytest.mark.parametrize("sp", [False, True])
def test_chunks_share_the_transfers_of_their_layer(ranks: RankPool, sp: bool) -> None:
    """One gather and one sum in each direction, as without recomputation."""
    whole, chunked = (layout("gqa2", tp=2, sp=sp, micro=2, remat=policy) for policy in ("none", "selective"))
    want = ranks.run(2, started, whole, weights_of(whole))
    assert ranks.run(2, started_in_chunks, chunked, weights_of(chunked)) == want
