"""Update rules, sharding and recomputation on NVIDIA GPUs: the bits of the CPU where promised, and its courses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from nxtrain.backends.base import Backend
from nxtrain.backends.rounding import step_hash
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.optim.rounding import rounding_keys
from nxtrain.train.step import train_step
from tests.support.adamw import ours, rounded
from tests.support.models import changed, random, weights_of
from tests.support.parity import (
    batches,
    check_course,
    gradient,
    layout,
    local_batch,
    rank_gradient,
    reference,
    run_ours,
    start,
)
from tests.support.ranks import RankPool

pytestmark = pytest.mark.cuda

STEPS = 5


def test_the_gpu_rounds_to_the_bits_of_the_cpu(backend: Backend) -> None:
    numbers = {"matrix": random(33, 17), "vector": random(7, scale=1e-20), "large": random(300, 1024, scale=1e20)}
    numbers["special"] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, 1e-45, 1.0]).repeat(5, 1)
    tables = ParamTable({name: ShardSpec(tuple(x.shape)) for name, x in numbers.items()})
    keys = rounding_keys(Layout(tables, Mesh.build(1, 0)), numbers, "param", 0, backend.put)
    for step in (1, 2, 500_000):
        (number,) = backend.scalars(float(step))
        for name, x in numbers.items():
            out = backend.put(torch.zeros(x.shape, dtype=torch.bfloat16))
            backend.kernels.stochastic_round(backend.put(x), out, keys[name], step_hash(number))
            assert torch.equal(out.cpu().view(torch.int16), rounded(x, step, name=name).view(torch.int16)), (step, name)
    nan = backend.put(torch.full((64, 64), torch.nan))
    out = backend.put(torch.zeros(64, 64, dtype=torch.bfloat16))
    (number,) = backend.scalars(1.0)
    keys = rounding_keys(
        Layout(ParamTable({"n": ShardSpec((64, 64))}), Mesh.build(1, 0)), {"n": nan}, "param", 0, backend.put
    )
    backend.kernels.stochastic_round(nan, out, keys["n"], step_hash(number))
    assert out.isnan().all()


@pytest.mark.parametrize("update", ["fp32_master", "bf16_stochastic", "bf16_kahan"])
def test_every_rule_stays_close_to_itself_on_the_cpu(backend: Backend, update: Any) -> None:
    """Float32 arithmetic differs in the last bit, which moves a rounding once in a while, and never by more."""
    _, actual = ours(backend.kernels, torch.bfloat16, update, backend.put)
    _, expected = ours(backend.host_kernels, torch.bfloat16, update)
    for name, parameter in expected.items():
        torch.testing.assert_close(actual[name].detach().cpu(), parameter.detach(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("update", ["fp32_master", "bf16_stochastic", "bf16_kahan"])
def test_a_compiled_update_stays_close_to_the_cpus(
    backend: Backend, update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(backend.kernels, "compiler", backend.compiler)
    _, actual = ours(backend.kernels, torch.bfloat16, update, backend.put)
    _, expected = ours(backend.host_kernels, torch.bfloat16, update)
    for name, parameter in expected.items():
        torch.testing.assert_close(actual[name].detach().cpu(), parameter.detach(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_recomputed_gradients_are_equal_bit_for_bit_and_full_needs_less_memory(backend: Backend, params: str) -> None:
    result, peaks = {}, {}
    for remat in ("none", "selective", "full"):
        resolved = layout("gqa2", tp=1, params=params, remat=remat)
        torch.cuda.reset_peak_memory_stats()
        result[remat] = rank_gradient(backend, resolved, weights_of(resolved))
        peaks[remat] = backend.diagnostics.peak_memory_bytes()
    for remat in ("selective", "full"):
        assert (result[remat].loss, result[remat].norm) == (result["none"].loss, result["none"].norm)
        for name, shard in result["none"].shards.items():
            assert torch.equal(result[remat].shards[name], shard)
    assert peaks["full"] < peaks["none"]


@pytest.mark.parametrize("shard", ["zero1", "grad_op", "full"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_cut_over_two_gpus_trains_as_transformers_does(two_gpus: RankPool, shard: str, accumulation: int) -> None:
    resolved = layout("gqa2", tp=1, dp=2, micro=2 // accumulation, shard=shard)
    expected = reference(layout("gqa2", tp=1), STEPS)
    check_course(two_gpus.run(2, run_ours, resolved, STEPS, weights_of(resolved)), expected, resolved)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"offload": ("params", "optimizer")}], ids=str)
def test_options_of_sharding_change_the_course_by_no_more_than_the_order_of_sums(
    two_gpus: RankPool, options: Mapping[str, Any]
) -> None:
    resolved = changed(layout("odd", tp=1, dp=2, micro=1, shard="full"), parallel=options)
    expected = reference(layout("odd", tp=1), STEPS)
    check_course(two_gpus.run(2, run_ours, resolved, STEPS, weights_of(resolved)), expected, resolved)


def device_bytes(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Of this rank after a step: bytes on the GPU, pinned bytes of the host's shards, entries that it updates."""
    before = torch.cuda.memory_allocated()
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), resolved.config.optim.lr)
    torch.cuda.synchronize()
    shards = state.data_parallel.shards.values()
    kept = [*shards, *(tensor for kind in state.optimizer.state.values() for tensor in kind.values())]
    on_device = [tensor.is_cuda for tensor in (*kept, state.optimizer.num_updates)]
    assert set(on_device) == {not resolved.config.parallel.offload}
    pinned = sum(shard.nbytes for shard in shards if shard.is_pinned())
    return torch.cuda.memory_allocated() - before, pinned, sum(shard.numel() for shard in shards)


def test_offloading_takes_parameters_and_state_off_the_device(two_gpus: RankPool) -> None:
    resolved = layout("gqa2", tp=1, dp=2, micro=1, shard="full", config={"vocab_size": 8192})
    resolved = changed(resolved, parallel={"prefetch": 0})
    offloaded = changed(resolved, parallel={"offload": ("params", "optimizer")})
    weights = weights_of(resolved)
    on_device, on_host = (two_gpus.run(2, device_bytes, run, weights) for run in (resolved, offloaded))
    for (stays, none, entries), (stays_offloaded, pinned, _) in zip(on_device, on_host, strict=True):
        at_rest = (4 + 2 * 4) * entries  # a parameter and its two running means, in fp32
        assert stays > at_rest and none == 0
        assert stays_offloaded < stays - 0.95 * at_rest
        assert pinned > 0.99 * 4 * entries


def norm_divided_by_four(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> float:
    state = start(backend, resolved, weights)
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
    (batch,) = batches(resolved, 1)
    return gradient(state, local_batch(state, batch, resolved.config.train.micro_batch)).norm


def test_a_wrong_divisor_would_be_seen(two_gpus: RankPool) -> None:
    resolved = layout("gqa2", tp=1, dp=2, micro=2, shard="full")
    (expected,) = reference(layout("gqa2", tp=1), 1).norms
    for norm in two_gpus.run(2, norm_divided_by_four, resolved, weights_of(resolved)):
        assert norm == pytest.approx(expected / 2, rel=1e-5)
