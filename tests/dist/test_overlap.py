"""Sums of gradients and blocks of the ring that are under way while a rank computes, also in its profile."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Done
from nxtrain.common.mesh import Axis
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.check import Resolved
from nxtrain.parallel.data_parallel import Bucketed, Reduction, Replicated
from nxtrain.tools.bench.train import SHAPE, Workload
from nxtrain.tools.bench.training import batch, ours
from nxtrain.train import build
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.step_profiler import StepProfiler
from tests.support.models import weights_of
from tests.support.overlap import PRODUCT, read_profiles
from tests.support.parity import batches, layout, local_batch, start
from tests.support.processes import patient_s
from tests.support.ranks import RankPool

BUCKET_BYTES = 16 << 10
LIMIT_S = patient_s(30)


def small_buckets(
    backend: CpuBackend, transport: str, resolved: Resolved, weights: Mapping[str, Tensor]
) -> tuple[TrainState, Bucketed]:
    """A state whose gradients fill several buckets."""
    backend.choose_transport(transport)
    with mock.patch.object(build, "Reduction", lambda **how: Reduction(**{**how, "bucket_bytes": BUCKET_BYTES})):
        state = start(backend, resolved, weights)
    return state, cast(Bucketed, state.data_parallel)


def backward(state: TrainState, resolved: Resolved) -> None:
    """Forward and backward pass of this rank's sequences, whose gradients are to be averaged."""
    (rows,) = batches(resolved, 1)
    batch = local_batch(state, rows, resolved.config.train.micro_batch)
    state.data_parallel.begin(last=True)
    ((inputs, targets),) = batch.micro_batches
    state.lm.loss(inputs, targets).backward()


def beside_an_absent_peer(backend: CpuBackend, *job: Any) -> tuple[int, int]:
    """Sums that rank 0 has started at the end of a backward pass before which rank 1 starts none; and their number."""
    state, parallel = small_buckets(backend, *job)
    store = dist.PrefixStore("overlap", dist.distributed_c10d._get_default_store())
    if backend.rank:
        store.wait(["computed"], timedelta(seconds=LIMIT_S))
    backward(state, job[1])
    result = len(parallel._started), len(parallel.buckets)
    if not backend.rank:
        store.set("computed", "")
    parallel.reduce()
    return result


def inside_a_backward_pass(backend: CpuBackend, *job: Any) -> tuple[bool, bool]:
    """True if the first sum is done inside the backward pass; and true if other buckets have not begun by then."""
    state, parallel = small_buckets(backend, "gloo", *job)
    results: list[tuple[bool, bool]] = []

    def look(_: Tensor) -> None:
        limit = time.monotonic() + LIMIT_S
        first = parallel._started.get(0)
        work = cast(Any, first).packed.work if first is not None else None
        while work is not None and not work.is_completed() and time.monotonic() < limit:
            time.sleep(0.001)
        is_done = work is not None and work.is_completed()
        results.append((is_done, len(parallel._started) < len(parallel.buckets)))

    early = next(p for name, p in state.model.named_parameters() if "layers.0." in name)
    early.register_post_accumulate_grad_hook(look)
    backward(state, job[0])
    parallel.reduce()
    return results[0]


def profiled(backend: CpuBackend, run: Path, awaited: bool) -> None:
    """Profile the second step of this replica, as metrics.profile_steps does; `awaited`: each sum where it starts."""
    backend.choose_transport("gloo")
    shape = {**SHAPE, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    work = Workload(1, 2, 256, "fp32", {**shape, "max_position_embeddings": 256})
    _, state = ours(work, backend, parallel={"bucket_mib": 1})
    profiler = StepProfiler(2, 2, run / LOGS_DIR, backend.rank, lambda line: None)
    state = state.reporting(profiler.section)
    inputs, targets = (x.unsqueeze(0) for x in batch(work))
    on_device = DeviceBatch.of(inputs, targets, backend.put)
    start_sum = Replicated._start

    def waiting(self: Replicated, *grads: Any) -> Any:
        pending = start_sum(self, *grads)
        result = pending.wait()
        return mock.Mock(wait=lambda: result)

    with mock.patch.object(Replicated, "_start", waiting) if awaited else nullcontext():
        for step in (1, 2):
            profiler.enter(step, "training")
            train_step(state, on_device, 1e-4)
            profiler.finish(step)


def products_beside_blocks(
    backend: CpuBackend, resolved: Resolved, weights: Mapping[str, Tensor], awaited: bool
) -> list[int]:
    """Products that this rank begins while each block of keys and values, or of their gradients, is under way."""
    backend.choose_transport("gloo")
    state = start(backend, resolved, weights)
    shift = C10dCollectives.start_shift

    def waiting(self: C10dCollectives, x: Tensor, axis: Axis, hops: int = 1) -> Done[Tensor]:
        return Done(shift(self, x, axis, hops).wait())

    shifts = mock.patch.object(C10dCollectives, "start_shift", waiting) if awaited else nullcontext()
    with shifts, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        backward(state, resolved)
    events = recorded.events()
    assert events is not None
    begins = [event.time_range.start for event in events if re.search(PRODUCT, event.name)]
    blocks = [event.time_range for event in events if event.name == "gloo:recv"]
    return [sum(block.start < begin < block.end for begin in begins) for block in blocks]


@pytest.fixture(scope="module")
def job() -> tuple[Resolved, dict[str, Tensor]]:
    resolved = layout("gqa2", tp=1, dp=2, micro=2)
    return resolved, dict(weights_of(resolved))


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_a_backward_pass_waits_for_no_sum(
    transport: str, ranks: RankPool, job: tuple[Resolved, dict[str, Tensor]]
) -> None:
    """Rank 1 starts its sums only once rank 0 has computed: a sum that is awaited where it starts never ends."""
    (started, number), _ = ranks.run(2, beside_an_absent_peer, transport, *job)
    assert started == number > 4


def test_a_sum_is_done_while_the_backward_pass_goes_on(
    ranks: RankPool, job: tuple[Resolved, dict[str, Tensor]]
) -> None:
    assert ranks.run(2, inside_a_backward_pass, *job) == [(True, True)] * 2


@pytest.mark.parametrize("awaited", [False, True])
def test_a_profile_shows_the_sums_beside_the_products_of_the_backward_pass(
    ranks: RankPool, tmp_path: Path, awaited: bool
) -> None:
    """A sum that is awaited where it starts has none beside it, as the same profile shows."""
    ranks.run(2, profiled, tmp_path, awaited)
    profiles = read_profiles(tmp_path)
    assert [profile.rank for profile in profiles] == [0, 1]
    for profile in profiles:
        assert [name for name, _ in profile.sections] == ["forward", "backward", "reduce", "optimizer"]
        assert len(profile.sums) > 4
        assert profile.products_beside == 0 if awaited else profile.products_beside > 0
        assert profile.overlap < 0.01 if awaited else profile.overlap > 0.01


@pytest.mark.parametrize("awaited", [False, True])
def test_a_profile_shows_the_products_beside_the_blocks_of_the_ring(ranks: RankPool, awaited: bool) -> None:
    """Of a layer's four transfers, only the last one, of the gradients that go home, has no product beside it."""
    resolved = layout("gqa2", tp=1, cp=2, micro=4, seq_len=64, cp_method="ring")
    num_layers = resolved.model.num_hidden_layers
    for counts in ranks.run(2, products_beside_blocks, resolved, weights_of(resolved), awaited):
        assert len(counts) == 4 * num_layers
        assert sum(count > 0 for count in counts) == (0 if awaited else 3 * num_layers)
