"""Predicted state bytes of fully sharded ranks against those that torch's `fully_shard` holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nxtrain.backends.base import Backend
from nxtrain.common.machines import MACHINES
from nxtrain.config.check import Resolved
from nxtrain.plan import memory, moments
from nxtrain.plan.job import Job
from nxtrain.train.build import build_model, build_state, mesh_of
from tests.support.models import plan
from tests.support.ranks import RankPool


def _own(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def held(backend: Backend, resolved: Resolved) -> dict[str, int]:
    """Bytes of parameters, of optimizer state apart from them, and of gradients after a backward pass."""
    mesh = mesh_of(resolved, backend)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    shards = {_own(p).untyped_storage().data_ptr() for p in state.model.parameters()}
    kept = [x for kind in state.optimizer.state.values() for x in kind.values()]
    apart = [x for x in kept if x.untyped_storage().data_ptr() not in shards]
    rows = torch.zeros(1, resolved.config.train.seq_len, dtype=torch.int64)
    for last in (False, True):
        state.data_parallel.begin(last=last)
        state.lm.loss(rows, rows).backward()
    reduced = list(state.data_parallel.reduce().values())
    return {
        "params": _bytes([_own(p) for p in state.model.parameters()]),
        "optimizer": _bytes(apart),
        "grads": _bytes(reduced),
    }


@pytest.mark.parametrize("shard", ["grad_op", "full", "hybrid"])
@pytest.mark.parametrize(
    "precision",
    [
        {"params": "bf16", "update": "fp32_master"},
        {"params": "bf16", "update": "fp32_master", "reduce": "bf16", "accumulate": "bf16"},
        {"params": "bf16", "update": "bf16_kahan", "state": "bf16"},
        {"params": "bf16", "update": "bf16_stochastic", "state": "bf16", "reduce": "bf16", "accumulate": "bf16"},
        {"params": "fp32", "update": "fp32"},
    ],
    ids=["master", "narrow", "kahan", "stochastic", "fp32"],
)
def test_state_bytes_of_sharded_ranks_are_predicted(ranks: RankPool, shard: str, precision: dict[str, Any]) -> None:
    resolved = plan("odd", parallel={"shard": shard}, precision=precision, train={"global_batch": 4, "micro_batch": 1})
    first, second = ranks.run(2, held, resolved)
    parallel = resolved.config.parallel.model_copy(update={"dp": 2})
    backend = resolved.config.backend.model_copy(update={"name": "cpu"})
    config = resolved.config.model_copy(update={"parallel": parallel, "backend": backend})
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, config)
    assert first == {
        "params": memory.params_bytes(job, 0),
        "optimizer": memory.optimizer_bytes(job, 0),
        "grads": moments.reduced_bytes(job, 0),
    }
    assert all(second[kind] <= first[kind] for kind in first)
