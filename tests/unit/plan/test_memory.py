"""Predicted memory against allocations: training state of built ranks exactly, activations by torch's dispatcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.collectives import Done, Pending
from nxtrain.common.machines import MACHINES
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.config.check import Resolved
from nxtrain.parallel.data_parallel import Bucketed
from nxtrain.plan import activations, memory, moments
from nxtrain.plan.job import Job
from nxtrain.tools.trace.fake_rank import LiveBytes
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from tests.support.drawn import FAMILIES
from tests.support.models import plan, tokens


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, by their entries; tensors that share entries count once each."""
    return sum(x.numel() * x.element_size() for x in tensors)


DRAWN = 40
"""Drawn layouts."""


def job_of(resolved: Resolved, mesh: Mesh) -> Job:
    config = resolved.config
    config = config.model_copy(
        update={
            "backend": config.backend.model_copy(update={"name": "cpu"}),
            "parallel": config.parallel.model_copy(update={"dp": mesh.dp_size}),
        }
    )
    return Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, config)


class Alone:
    """Collectives of a rank whose peers do not exist: results have the types and shapes of real ones."""

    lazy = False

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        return Done([tensor.to(dtype) for tensor in tensors])

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        return Done(x.chunk(axis.size)[axis.rank].clone())


def draw(seed: int) -> tuple[Resolved, Mesh]:
    """A model with sizes that do not divide, on a rank of a layout."""
    rng = Random(seed)
    tp, pp, dp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    kv_heads = rng.choice([2, 4, 8])
    virtual_pp = rng.choice([1, 2]) if pp > 1 else 1
    params = rng.choice(["fp32", "bf16"])
    update = "fp32" if params == "fp32" else rng.choice(["fp32_master", "bf16_stochastic", "bf16_kahan"])
    accumulate = "fp32" if params == "fp32" else rng.choice(["fp32", "bf16"])
    shape = {
        "vocab_size": rng.randrange(100, 200),
        "hidden_size": 64,
        "intermediate_size": rng.randrange(80, 130),
        "num_hidden_layers": rng.randrange(pp * virtual_pp, 9),
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    resolved = plan(
        "mha",
        model={
            "family": FAMILIES[seed % len(FAMILIES)],
            "config": shape,
            "fused_qkv": rng.random() < 0.5,
            "fused_gate_up": rng.random() < 0.5,
        },
        parallel={
            "tp": tp,
            "pp": pp,
            "virtual_pp": virtual_pp,
            "shard": rng.choice(["none", "zero1"]),
            "bucket_mib": 1,
            "sequence_parallel": rng.random() < 0.5,
        },
        precision={
            "params": params,
            "update": update,
            "accumulate": accumulate,
            "reduce": rng.choice(["fp32", "bf16"]),
            "state": rng.choice(["fp32", "bf16"]),
        },
        train={"global_batch": dp * rng.choice([1, 3]), "micro_batch": 1},
        optim={"name": ("adamw", "muon")[seed % 2], "ema_decay": (0.0, 0.999)[seed // 2 % 2]},
    )
    world = tp * pp * dp
    # Of the ranks of a stage, the first holds the most rows.
    return resolved, build_mesh(resolved, world, rng.randrange(pp) * tp * dp, ranks_per_node=world)


def state_of(resolved: Resolved, mesh: Mesh) -> TrainState:
    backend = CpuBackend()
    backend.collectives = Alone()  # type: ignore[assignment]
    return build_state(resolved, build_model(resolved, backend, mesh, init="zeros"), backend, mesh)


def accumulate(state: TrainState, num_micro: int) -> list[Tensor]:
    """Gradients after the last micro-batch; the model itself need not run to give every parameter one."""
    held = state.data_parallel
    assert isinstance(held, Bucketed)
    for micro in range(num_micro):
        held.begin(last=micro == num_micro - 1)
        torch.stack([p.float().sum() for p in state.model.parameters()]).sum().backward()
    grads = [p.grad for p in state.model.parameters() if p.grad is not None]
    return [*grads, *held.sums.values()]


@pytest.mark.parametrize("seed", range(DRAWN))
def test_state_bytes_are_those_of_a_rank_that_is_built(seed: int) -> None:
    resolved, mesh = draw(seed)
    state, job = state_of(resolved, mesh), job_of(resolved, mesh)
    stage = mesh.pp.rank
    assert memory.params_bytes(job, stage) == num_bytes(state.model.parameters())
    own = state.data_parallel.shards.values() if resolved.config.parallel.shard == "zero1" else ()
    kept = [x for kind in state.optimizer.state.values() for x in kind.values()]
    assert memory.optimizer_bytes(job, stage) == num_bytes([*kept, *own])
    if mesh.dp_size == 1:  # else buckets are reduced while backward still runs
        assert moments.accumulated_bytes(job, stage) == num_bytes(accumulate(state, job.num_micro))
    else:
        accumulate(state, job.num_micro)
    assert moments.reduced_bytes(job, stage) == num_bytes(state.data_parallel.reduce().values())


def test_the_stage_that_needs_most_is_chosen() -> None:
    resolved, mesh = draw(3)
    job = job_of(resolved, mesh)
    totals = [memory.stage_bytes(job, stage).total for stage in range(job.config.parallel.pp)]
    stage, result = memory.rank_bytes(job)
    assert (result.total, stage) == (max(totals), totals.index(max(totals)))


SIZED = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


def run(resolved: Resolved) -> tuple[int, int, Job]:
    """Bytes alive after a forward pass; the peak of a whole step; and the job."""
    backend, mesh = CpuBackend(), Mesh(1, 0)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    job = job_of(resolved, mesh)
    train = resolved.config.train
    rows = tokens(resolved, train.global_batch)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    state_tensors = [*state.model.parameters(), *state.model.buffers()]
    with LiveBytes(state_tensors) as forward:
        loss = state.lm.loss(inputs[: train.micro_batch], targets[: train.micro_batch])
        held = forward.now
    loss.backward()
    state.model.zero_grad()
    assert isinstance(state.data_parallel, Bucketed)
    state.data_parallel.sums.clear()
    shape = (-1, train.micro_batch)
    batch = DeviceBatch.of(inputs.unflatten(0, shape), targets.unflatten(0, shape), backend.put)
    with LiveBytes(state_tensors) as step:
        train_step(state, batch, 1e-3)
    return held, step.peak, job


def settings(remat: str, change: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": SIZED},
        "train": {"seq_len": 256, "micro_batch": 4, "global_batch": 8, "remat": remat},
        "precision": {"params": "bf16", "update": "fp32_master"},
    }
    for name, table in change.items():
        tables[name] = {**tables.get(name, {}), **table}
    return tables


def sharded_job(**parallel: Any) -> Job:
    """A rank of two that shard parameters of six blocks."""
    resolved = plan(
        "mha",
        model={"config": SIZED},
        parallel={"shard": "full", "dp": 2, **parallel},
        precision={"params": "bf16", "update": "fp32_master"},
        train={"seq_len": 256, "micro_batch": 2, "global_batch": 8},
    )
    return job_of(resolved, Mesh.build(2, 0, dp=2))


@pytest.mark.parametrize("shard", ["none", "zero1", "full"])
@pytest.mark.parametrize("kind", ["params", "optimizer", "activations"])
def test_offloading_moves_the_bytes_of_a_kind_from_the_device_to_the_host(shard: str, kind: str) -> None:
    given, moved = sharded_job(shard=shard), sharded_job(shard=shard, offload=(kind,))
    before, after = memory.stage_bytes(given, 0), memory.stage_bytes(moved, 0)
    on_host = memory.host_bytes(moved, 0)
    assert memory.host_bytes(given, 0)["total"] == 0
    changed = {name for name, size in after.to_json().items() if size != before.to_json()[name]} - {"total"}
    if kind == "params" and shard != "full":
        assert on_host["total"] == 0 and not changed
        return
    assert on_host["total"] == sum(size for name, size in on_host.items() if name != "total") > 0
    if kind == "optimizer":
        own_rows = memory.own_rows_bytes(given, 0)
        assert (after.optimizer, on_host["optimizer"]) == (own_rows, before.optimizer - own_rows)
        assert changed == {"optimizer"} and (own_rows > 0) == (shard == "zero1")
    if kind == "params":
        assert (after.params, on_host["params"]) == (0, before.params)
        assert on_host["grads"] == moments.accumulated_bytes(given, 0)
    if kind == "activations":
        assert on_host["activations"] == 6 * activations.block_bytes(given)
        most = [max(moment.activations for moment in moments.moments_of(job, 0)) for job in (given, moved)]
        assert most[0] - most[1] == 4 * activations.block_bytes(given)


def test_units_of_several_blocks_are_gathered_whole() -> None:
    block = 2 * 128 + 128 * 128 * 3 + 128 * 352 * 3

    def gathered(**parallel: Any) -> int:
        return max(moment.buckets for moment in moments._gathering(sharded_job(**parallel), 0, 0))

    def grads(blocks: int) -> int:  # in bf16 and in the type of the reduction
        return blocks * block * 6

    sizes = (0, block, block + 1, 2 * block + 1)
    assert [moments.unit_blocks(sharded_job(unit_params=size), 0) for size in sizes] == [1, 1, 2, 3]
    norm, matrix = 128, 1000 * 128  # gradients are in bf16, and twice in fp32, since gloo reduces a copy
    for blocks, fewest in ((1, 0), (2, block + 1), (3, 2 * block + 1)):
        for kind, prefetch in (("before", 1), ("before", 2), ("after", 1), ("none", 1)):
            ahead = 0 if kind == "none" else prefetch
            result = gathered(unit_params=fewest, backward_prefetch=kind, prefetch=prefetch)
            units = min(6, blocks * (1 + ahead)) * block * 2
            assert result == max(norm * 2 + units + max(grads(blocks), matrix * 8), (matrix + norm) * 10)


def test_fp16_has_the_state_of_bf16_and_a_wide_gradient_of_the_logits() -> None:
    def result(params: str) -> dict[str, int]:
        precision = {"params": params, "update": "fp32_master"}
        return memory.stage_bytes(job_of(plan("mha", precision=precision), Mesh(1, 0)), 0).to_json()

    state = ("params", "frozen", "grads", "optimizer")
    assert [result("fp16")[kind] for kind in state] == [result("bf16")[kind] for kind in state]
    tokens, vocabulary = 32, 128
    assert result("fp16")["logits"] - result("bf16")["logits"] == 4 * tokens * vocabulary
