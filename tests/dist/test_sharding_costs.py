"""Costs of each sharding of training state to a rank: bytes at rest, and collectives per step; both counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.mesh import Axis
from nxtrain.config.check import Resolved
from nxtrain.plan.traffic import gather_bytes
from nxtrain.train.step import TrainState, train_step
from tests.support.memory import job_of
from tests.support.models import changed, weights_of
from tests.support.parity import batches, layout, local_batch, start
from tests.support.ranks import RankPool

BYTES = {"fp32": 4, "bf16": 2}
EXTRA = {"fp32": 0, "fp32_master": 4, "bf16_stochastic": 0, "bf16_kahan": 2}
"""Bytes per parameter that a rule keeps beside parameters and running means."""

LAYERS = 2


def bytes_at_rest(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Of parameters and optimizer state after a step, each storage once; and the parameters of this tp rank."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    spec_shapes = [spec.local_shape(state.mesh.tp) for spec in state.table.values()]
    return sum(held(state).values()), sum(torch.Size(shape).numel() for shape in spec_shapes)


def held(state: TrainState) -> dict[int, int]:
    """Bytes of each storage by its address."""
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in state.model.parameters()]
    tensors = [*parameters, *state.data_parallel.shards.values()]
    tensors += [tensor for kind in state.optimizer.state.values() for tensor in kind.values()]
    assert all(p.grad is None for p in state.model.parameters())
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


UPDATES = [("fp32", "fp32"), ("fp32_master", "fp32"), ("bf16_stochastic", "bf16"), ("bf16_kahan", "bf16")]
SHARDS = ["none", "zero1", "grad_op", "full", "hybrid"]

# Every update rule meets every cut of state, and each of both meets tp and its absence.
STORED = [
    (shard, 1 + (row + column) % 2, *how) for row, shard in enumerate(SHARDS) for column, how in enumerate(UPDATES)
]


@pytest.mark.parametrize(("shard", "tp", "update", "state"), STORED)
def test_bytes_at_rest_are_what_the_formula_says(ranks: RankPool, shard: str, tp: int, update: str, state: str) -> None:
    params = "fp32" if update == "fp32" else "bf16"
    dp = 4 // tp
    cut = {"none": 1, "hybrid": 2}.get(shard, dp)
    resolved = layout("gqa2", tp=tp, dp=dp, micro=1, params=params, update=update, shard=shard)
    resolved = changed(resolved, precision={"state": state}, parallel={"shard_size": 2 if shard == "hybrid" else 0})
    stored, beside = BYTES[params], EXTRA[update]
    if shard in ("grad_op", "full", "hybrid"):
        stored = 4  # FSDP2 gives reduced gradients, here fp32, the type of the parameters it stores
        beside = 0 if update == "fp32_master" else beside  # which then are their own masters
    whole = {"none": 0, "zero1": BYTES[params]}.get(shard, 0)
    per_parameter = whole + (stored + 2 * BYTES[state] + beside) / cut
    for bytes_, num_params in ranks.run(4, bytes_at_rest, resolved, weights_of(resolved)):
        assert bytes_ == pytest.approx(num_params * per_parameter, rel=0.02)


class _Counting(TorchDispatchMode):
    """Counts collectives as torch dispatches them, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.calls[name] += 1
            if name in WHOLE:
                self.bytes += args[WHOLE[name]].nbytes
        return func(*args, **(kwargs or {}))


WHOLE = {"allgather_base": 0, "reduce_scatter_base": 1}
"""Argument of a collective that has the entries of all ranks."""


def counted_step(backend: CpuBackend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Collectives of a step, and the bytes of gathers and scatters with the entries of all ranks."""
    backend.choose_transport("gloo")  # torch dispatches what goes through it
    state = start(backend, resolved, weights)
    for batch in batches(resolved, 2):  # the first makes the groups
        local = local_batch(state, batch, resolved.config.train.micro_batch)
        with _Counting() as counting:
            train_step(state, local, 1e-3)
    return dict(counting.calls), counting.bytes


def collectives_of_a_step(backend: CpuBackend, resolved: Resolved, weights: Mapping[str, Tensor]) -> dict[str, int]:
    calls, _ = counted_step(backend, resolved, weights)
    return calls


UNITS = LAYERS + 3
"""Units that are gathered together: each block, the embedding, the output projection, and the last norm."""
SCALARS = 1
"""All-reduces of every step: the loss with the number of tokens."""


@pytest.mark.parametrize("micro", [2, 1])
@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("none", lambda _: {"allreduce": SCALARS + 1}),
        ("zero1", lambda _: {"allreduce": SCALARS + 1, "reduce_scatter_base": 1, "allgather_base": 1}),
        # Gathered once for both passes, or blocks again for the backward pass; gradients scattered per micro-batch.
        (
            "grad_op",
            lambda n: {"allreduce": SCALARS + 1, "reduce_scatter_base": UNITS * n, "allgather_base": UNITS * n},
        ),
        (
            "full",
            lambda n: {
                "allreduce": SCALARS + 1,
                "reduce_scatter_base": UNITS * n,
                "allgather_base": (UNITS + LAYERS) * n,
            },
        ),
    ],
)
def test_collectives_of_a_step_are_what_each_cut_needs(ranks: RankPool, shard: str, expected: Any, micro: int) -> None:
    resolved = layout("gqa2", tp=1, dp=2, micro=micro, shard=shard)
    for actual in ranks.run(2, collectives_of_a_step, resolved, weights_of(resolved)):
        assert actual == expected(2 // micro)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["grad_op", "full"])
def test_gathered_and_scattered_bytes_are_those_of_the_plan(
    ranks: RankPool, shard: str, tied: bool, params: str
) -> None:
    config = {"vocab_size": 512, "tie_word_embeddings": tied}
    resolved = layout("gqa2", tp=1, dp=2, micro=1, params=params, shard=shard, config=config)
    job = job_of(resolved)
    share = (job.shard_size - 1) / job.shard_size
    expected = job.num_micro * gather_bytes(job, 0) / share
    for _, actual in ranks.run(2, counted_step, resolved, weights_of(resolved)):
        assert actual == pytest.approx(expected, rel=0.01)  # rows that ranks cannot share evenly are padded


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hybrid_sums_across_nodes_once_per_step(ranks: RankPool, accumulation: int) -> None:
    resolved = layout("gqa2", tp=1, dp=4, micro=1, shard="hybrid", shard_size=2)
    resolved = changed(resolved, train={"global_batch": 4 * accumulation})
    (result, *_) = ranks.run(4, collectives_of_a_step, resolved, weights_of(resolved))
    assert result == {
        "allreduce": SCALARS + 1 + UNITS,
        "reduce_scatter_base": UNITS * accumulation,
        "allgather_base": (UNITS + LAYERS) * accumulation,
    }


@pytest.mark.parametrize(("remat", "prefetch"), [("none", 0), ("none", 1), ("full", 1)])
def test_divided_experts_are_gathered_once_for_each_pass(ranks: RankPool, prefetch: int, remat: str) -> None:
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6}
    resolved = layout("gqa2", tp=1, dp=4, ep=2, micro=1, shard="full", remat=remat, family="mixtral", config=shape)
    resolved = changed(resolved, parallel={"prefetch": prefetch})
    for actual in ranks.run(4, collectives_of_a_step, resolved, weights_of(resolved)):
        assert actual["reduce_scatter_base"] == UNITS + LAYERS
        assert actual["allgather_base"] == UNITS + LAYERS + 2 * LAYERS


def in_three_buckets(shard: str, micro: int) -> Resolved:
    """Embedding and head are larger than a bucket; the layers between them fit into one."""
    resolved = layout("gqa2", tp=1, dp=2, micro=micro, shard=shard, config={"vocab_size": 8192})
    return changed(resolved, parallel={"bucket_mib": 1})


def test_buckets_have_the_size_that_is_configured(ranks: RankPool) -> None:
    resolved = in_three_buckets("zero1", micro=1)
    (result, _) = ranks.run(2, collectives_of_a_step, resolved, weights_of(resolved))
    assert result == {"allreduce": SCALARS + 1, "reduce_scatter_base": 3, "allgather_base": 3}


class Recording(C10dCollectives):
    def __init__(self, world: int, log: list[str]) -> None:
        super().__init__(world)
        self._log = log

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        self._log.append(f"bucket of {len(tensors)}")
        return super().start_all_reduce_bucket(tensors, axis, dtype, scale)


def events_of_a_step(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[str]:
    log: list[str] = []
    backend.collectives = Recording(backend.world, log)
    state = start(backend, resolved, weights)
    parameters = dict(state.model.named_parameters())
    for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"):
        parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    return log


def test_buckets_start_in_reverse_order_while_the_last_backward_pass_goes_on(ranks: RankPool) -> None:
    resolved = in_three_buckets("none", micro=1)
    head, norm, embedding = "lm_head.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"
    for log in ranks.run(2, events_of_a_step, resolved, weights_of(resolved)):
        assert log == [
            *(head, norm, embedding),  # the first micro-batch only adds up
            *("bucket of 1", head),
            *("bucket of 13", norm),
            *("bucket of 1", embedding),
        ]
