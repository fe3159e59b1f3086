"""Bytes that ranks of a real run send over cp, against the formula of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.mesh import Axis
from nxtrain.common.vocab import END_BIT
from nxtrain.config.check import Resolved
from nxtrain.plan.context import context_bytes
from nxtrain.train.step import train_step
from tests.dist.test_document_stages import Rows, packed_documents
from tests.support.corpora import END
from tests.support.memory import job_of
from tests.support.models import weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool


class CountedCollectives(C10dCollectives):
    """Collectives that count the bytes which this rank sends over cp, as rings of neighbours send them."""

    sent = 0

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        self._count(x, axis, hops=int(hops % axis.size > 0))
        return super().start_shift(x, axis, hops)

    def all_gather(self, x: Tensor, axis: Axis) -> Tensor:
        self._count(x, axis, hops=axis.size - 1)
        return super().all_gather(x, axis)

    def reduce_scatter(self, x: Tensor, axis: Axis) -> Tensor:
        self._count(x[: x.shape[0] // axis.size], axis, hops=axis.size - 1)
        return super().reduce_scatter(x, axis)

    def _count(self, x: Tensor, axis: Axis, hops: int) -> None:
        if axis.name == "cp":
            self.sent += hops * x.numel() * x.element_size()


def sent_in_a_step(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rows: Rows | None = None
) -> int:
    """Bytes of this rank in a step, perhaps of given packed documents."""
    backend.collectives = counted = CountedCollectives(backend.world)
    state = start(backend, resolved, weights)
    if rows is None:
        (batch,) = batches(resolved, 1)
        on_rank = local_batch(state, batch, resolved.config.train.micro_batch)
    else:
        on_rank = packed_documents(state, resolved, rows)
    train_step(state, on_rank, 1e-3)
    return counted.sent


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize(
    "change",
    [
        {"cp": 2, "dp": 1, "remat": "none"},
        {"cp": 3, "dp": 1, "remat": "full", "params": "bf16", "seq_len": 24},
        {"cp": 2, "dp": 1, "tp": 2, "sp": True, "remat": "selective", "params": "bf16", "shard": "zero1"},
    ],
    ids=["two", "three, recomputed, bf16", "tp and zero1"],
)
def test_a_rank_sends_the_planned_bytes_over_cp(ranks: RankPool, method: str, change: dict[str, Any]) -> None:
    resolved = layout("gqa2", cp_method=method, micro=2, batch=4, **{"tp": 1, **change})
    parallel = resolved.config.parallel
    result = ranks.run(parallel.ranks_per_replica * parallel.dp, sent_in_a_step, resolved, weights_of(resolved))
    job = job_of(resolved)
    planned = job.num_micro * sum(context_bytes(job, resolved.dimensions.num_layers))
    assert set(result) == {planned} and planned > 0


@pytest.mark.parametrize("documents", ["inside of pieces", "across a cut"])
@pytest.mark.parametrize(
    "change",
    [
        {"cp": 2, "dp": 2, "remat": "none", "shard": "full"},
        {"cp": 3, "dp": 1, "remat": "full", "cp_layout": "contiguous", "params": "bf16", "seq_len": 24},
        {"cp": 2, "dp": 1, "pp": 2, "remat": "selective", "schedule": "zero_bubble"},
        {"cp": 4, "dp": 1, "remat": "selective", "cp_layout": "contiguous", "shard": "zero1"},
    ],
    ids=["fsdp", "recomputed, bf16", "pipeline", "four, zero1"],
)
def test_a_ring_sends_only_what_documents_can_see(ranks: RankPool, change: dict[str, Any], documents: str) -> None:
    """Tensors of documents stay those that were noted, through recomputation, sharded blocks and pipelines."""
    resolved = layout("gqa2", tp=1, cp_method="ring", micro=2, batch=8, **change)
    parallel, seq_len = resolved.config.parallel, resolved.config.train.seq_len
    is_zigzag = parallel.cp_layout == "auto"
    piece = seq_len // (parallel.cp * (2 if is_zigzag else 1))
    rows = np.full((8, seq_len + 1), 3)
    rows[:, piece - 1 : seq_len : piece] = END | END_BIT
    if documents == "across a cut":  # of one row: between the first two pieces, which neighbours have
        rows[5, piece - 1] = 3
    num_ranks = parallel.ranks_per_replica * parallel.dp
    results = ranks.run(num_ranks, sent_in_a_step, resolved, weights_of(resolved), rows)
    if documents == "inside of pieces":
        assert set(results) == {0}
        return
    model: Any = resolved.model
    head_size = model.hidden_size // model.num_attention_heads
    numbers = 2 * (seq_len // parallel.cp) * 2 * model.num_key_value_heads * head_size
    element = 2 if resolved.config.precision.params == "bf16" else 4
    passes = 2 if resolved.config.train.remat == "none" else 3
    of_layer = numbers * (passes * element + 2 * 4)
    layers = resolved.dimensions.num_layers // parallel.pp
    # The replica of the row alone sends, in each layer of each stage; on two ranks a hop back is a hop on.
    assert sorted(set(results)) == ([0, layers * of_layer] if parallel.dp > 1 else [layers * of_layer])
