"""Context parallelism under drawn layouts: packed documents compute what transformers computes of each alone."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.ranged_attention import whole_rows
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import CutLayout, SequenceCut
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.parallel.context_parallel import ContextParallel, visible_hops
from tests.dist.test_document_stages import (
    MUTANTS,
    documents_alone,
    documents_on_rank,
    documents_with_mutant,
    hold_documents,
)
from tests.support.contract_ranges import exact_ranged
from tests.support.corpora import END
from tests.support.drawn import one_in
from tests.support.models import weights_of
from tests.support.parity import layout, relative_errors, whole
from tests.support.ranks import RankPool

SEED, CASES = 20, 64
DEGREES = ({"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2})
"""Degrees of the layouts, in turn; at most four ranks."""


def drawn_layout(random: Random, index: int) -> Resolved:
    """A layout with context parallelism, whose sequences have the length that its division asks for."""
    degrees = {"tp": 1, "pp": 1, "dp": 1, **DEGREES[index % len(DEGREES)]}
    cp, tp, pp, dp = (degrees[name] for name in ("cp", "tp", "pp", "dp"))
    cp_layout = random.choice(("auto", "contiguous", "zigzag", "striped"))
    sp = tp > 1 and random.random() < 0.5
    parts = cp * (2 if cp_layout == "zigzag" else 1) * (tp if sp else 1)
    shards = ["none", "zero1", "grad_op", "full"]
    if pp > 1:
        shards = ["none", "zero1"]
    micro = random.choice((1, 2))
    return layout(
        random.choice(("mha", "gqa2", "tied", "llama3-rope")),
        cp=cp,
        cp_layout=cp_layout,
        cp_method=random.choice(("gather", "ring")),
        tp=tp,
        pp=pp,
        dp=dp,
        sp=sp,
        shard=random.choice(shards),
        schedule=random.choice(("1f1b", "zero_bubble")) if pp > 1 else "1f1b",
        micro=micro,
        batch=micro * dp * random.randint(1, 3),
        remat=random.choice(("none", "selective", "full")),
        seq_len=parts * random.randint(1, 40 // parts),
        config={"num_hidden_layers": random.randint(pp, 3)},
    )


@pytest.mark.parametrize("index", one_in(4, range(CASES)))
def test_packed_documents_of_a_drawn_layout_are_those_of_transformers(ranks: RankPool, index: int) -> None:
    random = Random(SEED + index)
    hold_documents(ranks, drawn_layout(random, index), random, bound=1e-5)


@pytest.mark.parametrize("index", one_in(8, range(CASES, 2 * CASES)))
def test_packed_documents_in_calls_of_a_flash_kernel_are_those_of_transformers(ranks: RankPool, index: int) -> None:
    """The division into calls is that of GPUs, and the kernel is torch's for CPUs.

    https://github.com/pytorch/torchtitan/issues/2536: documents of varying length with context parallelism are refused.
    """
    random = Random(SEED + index)
    hold_documents(ranks, drawn_layout(random, index), random, bound=1e-5, flash=True)


OF_CALLS = ("stale block in the backward ring", "skipped block that is visible", "sums of a block in its backward")


@pytest.mark.parametrize(
    ("name", "flash"), [*((name, False) for name in MUTANTS), *((name, True) for name in OF_CALLS)]
)
def test_a_defect_of_a_peer_is_seen(ranks: RankPool, name: str, flash: bool) -> None:
    """Rows of three documents, of which one crosses the cut and one has targets that do not count."""
    method, _ = MUTANTS[name]
    resolved = layout("gqa2", tp=1, cp=2, cp_layout="contiguous", cp_method=method, micro=1, batch=2, seq_len=16)
    random = Random(SEED)
    rows = np.array([[random.randrange(1, resolved.model.vocab_size) for _ in range(17)] for _ in range(2)])
    rows[:, [2, 11]] = END | END_BIT
    rows[1, 14:] = IGNORE_INDEX
    weights = weights_of(resolved)
    loss, _, grads = documents_alone(resolved, weights, rows)
    result = ranks.run(2, documents_with_mutant, name, resolved, weights, rows, flash)
    errors = relative_errors(whole([rank.shards for rank, _ in result], resolved), grads)
    assert abs(result[0][0].loss - loss) > 1e-4 or max(errors.values()) > 1e-3
    sound = ranks.run(2, documents_on_rank, resolved, weights, rows, flash)
    errors = relative_errors(whole([rank.shards for rank, _ in sound], resolved), grads)
    assert abs(sound[0][0].loss - loss) < 2e-6
    assert max(errors.values()) < 1e-5


def drawn_row(seed: int, seq_len: int) -> list[Tensor]:
    """Queries, keys, values and a gradient of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(seq_len, 1, heads, 8, generator=generator) for heads in (4, 2, 2, 4)]


def attended_by_ring(
    backend: Backend, cut: SequenceCut, window: int | None, starts: Tensor | None, seed: int
) -> tuple[list[Tensor], int]:
    """Output and gradients at this rank's positions, and the number of transfers that it began."""
    axis = Mesh.build(backend.world, backend.rank, cp=backend.world).cp
    context = ContextParallel(axis, cut, "ring", backend.collectives, backend.kernels)
    q, k, v, grad = (x[context.positions] for x in drawn_row(seed, cut.seq_len))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    own = None
    if starts is not None:
        own = starts[:, context.positions].contiguous()
        context.learn(own, starts)
    shift, hops = C10dCollectives.start_shift, []

    def counted(self: C10dCollectives, x: Tensor, axis: Any, number: int = 1) -> Any:
        hops.append(number)
        return shift(self, x, axis, number)

    with mock.patch.object(C10dCollectives, "start_shift", counted):
        out = context.attention(inputs[0], inputs[1], inputs[2], context.positions, own, window)
        out.backward(grad)
    moved = [number for number in hops if number % axis.size]
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)], len(moved)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout_", ["contiguous", "zigzag", "striped"])
def test_a_ring_that_passes_over_ranks_computes_all_that_is_seen(
    ranks: RankPool, layout_: CutLayout, seed: int
) -> None:
    """A block does not go to ranks whose windows and documents do not reach it."""
    random = Random(seed)
    size = random.choice((2, 3, 4))
    cut = SequenceCut(2 * size * random.randint(1, 4), size, layout_)
    window = random.choice((None, random.randint(1, cut.seq_len)))
    starts = None
    if window is None or random.random() < 0.5:
        begins = sorted(random.sample(range(1, cut.seq_len), random.randint(0, cut.seq_len // 4)))
        starts = torch.tensor([[max([0, *(b for b in begins if b <= p)]) for p in range(cut.seq_len)]])
    results = ranks.run(size, attended_by_ring, cut, window, starts, seed)
    *operands, grad = (x.double() for x in drawn_row(seed, cut.seq_len))
    q, k, v = (x.requires_grad_() for x in operands)
    out, _ = exact_ranged(q, k, v, whole_rows(q, starts, window))
    out.backward(grad)
    wanted = [out.detach(), q.grad, k.grad, v.grad]
    num_hops = len(visible_hops(cut, window, starts)) - 1
    for rank, (found, transfers) in enumerate(results):
        assert transfers == (3 * num_hops + 1 if num_hops else 0), "keys forward, keys and gradients backward"
        for ours, whole_ in zip(found, wanted, strict=True):
            assert whole_ is not None
            torch.testing.assert_close(ours.double(), whole_[list(cut.listed(rank))], rtol=0, atol=1e-5)
