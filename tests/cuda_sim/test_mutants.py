"""Defects that the record of a pretended GPU must show."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cuda import CudaBackend, CudaKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.nn.norm import RMSNorm
from nxtrain.train.health.step_history import not_finite
from tests.cuda_sim.test_communicators import Judgement, judged
from tests.cuda_sim.test_steps import step_alone
from tests.support.cuda_sim import Record, SimulatedGpu


def step_that_reads() -> Record:
    """A step that reads the loss on the host."""
    from nxtrain.train import step

    def read(loss: Tensor, norm: Tensor) -> Tensor:
        loss.item()
        return not_finite(loss, norm)

    with patch.object(step, "not_finite", read):
        return step_alone({})


def step_of_pageable_batches() -> Record:
    """A step whose batch is uploaded from memory that is not pinned."""
    with patch.object(CudaBackend, "put", lambda self, x: x.to(self.device)):
        return step_alone({})


def step_with_scores() -> Record:
    """A step whose attention keeps scores in memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from nxtrain.backends.torch_attention import sdpa

    def attention(self: CudaKernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(q, k, v, grouped=True)

    with patch.object(CudaKernels, "attention", attention):
        return step_alone({})


def step_of_broken_graphs() -> Record:
    """A compiled step whose norms end a graph."""
    forward = RMSNorm.forward

    def broken(self: RMSNorm, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    with patch.object(RMSNorm, "forward", broken):
        return step_alone({"compile": {"torch_compile": True}})


def test_a_read_of_the_host_is_seen(gpu: SimulatedGpu) -> None:
    (wait, *_) = gpu.run(step_that_reads).host_waits
    assert wait.kind == "sync"


def test_a_copy_from_pageable_memory_is_seen(gpu: SimulatedGpu) -> None:
    copies = gpu.run(step_of_pageable_batches).pageable_copies
    assert {(event.fields["from"], event.fields["to"]) for event in copies} == {("pageable", "device")}


def test_attention_that_keeps_scores_is_seen(gpu: SimulatedGpu) -> None:
    kernels = gpu.run(step_with_scores).kernels
    assert any("softmax" in kernel.lower() for kernel in kernels)
    assert not any("flash" in kernel for kernel in kernels)


def test_a_graph_that_breaks_is_seen(gpu: SimulatedGpu) -> None:
    with pytest.raises(AssertionError, match="graph_break"):
        gpu.run(step_of_broken_graphs)


def ring_of_separate_transfers() -> Judgement:
    """Two ranks that pass keys and values in a ring, each of which waits to send before it receives."""

    def shift(self: C10dCollectives, x: Tensor, axis: Any, hops: int = 1) -> Any:
        self.start_send(x, axis, (axis.rank + hops) % axis.size).wait()
        return self.start_receive(x, axis, (axis.rank - hops) % axis.size)

    with patch.object(C10dCollectives, "start_shift", shift):
        return judged(2, {"parallel": {"cp": 2}})


def stages_with_a_swapped_transfer() -> Judgement:
    """Two stages, of which the second receives another micro-batch before it sends a gradient."""
    from nxtrain.parallel import pipeline, schedule

    def swapped(*args: Any) -> schedule.Schedule:
        first, last = schedule.schedule(*args)
        transfers = [index for index, action in enumerate(last) if action.is_transfer]
        sent, received = next((a, b) for a, b in pairwise(transfers) if last[a].is_send and not last[b].is_send)
        return first, (*last[:sent], last[received], *last[sent:received], *last[received + 1 :])

    with patch.object(pipeline, "schedule", swapped):
        return judged(2, {"parallel": {"pp": 2}, "train": {"global_batch": 4, "micro_batch": 1}})


@pytest.mark.parametrize("mutant", [ring_of_separate_transfers, stages_with_a_swapped_transfer])
def test_transfers_that_wait_for_each_other_are_seen(gpu: SimulatedGpu, mutant: Callable[[], Judgement]) -> None:
    unequal, stuck, _ = gpu.run(mutant)
    assert unequal == []
    assert len(stuck) == 2


def losing_rank() -> Judgement:
    """Two ranks, of which one reduces a sum that the other does not."""

    def reduce(self: C10dCollectives, x: Tensor, axis: Any, *args: Any) -> Any:
        if axis.rank == 1 and x.numel() > 4:
            start(self, x.clone(), axis, *args)
        return start(self, x, axis, *args)

    start = C10dCollectives.start_all_reduce
    with patch.object(C10dCollectives, "start_all_reduce", reduce):
        return judged(2, {"parallel": {"tp": 2}})


def test_a_sum_of_one_rank_alone_is_seen(gpu: SimulatedGpu) -> None:
    unequal, stuck, _ = gpu.run(losing_rank)
    assert "ranks 0 and 1" in unequal[0]
    assert stuck
