"""Steps on a pretended GPU have no race between streams, nor with the host; a wait that is left out is one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest

from tests.cuda_sim.test_steps import OPTIONS, TRAIN, started, step
from tests.support.cuda_sim import SimulatedGpu, opened_gpu, play


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimulatedGpu]:
    """A process with torch's first implementation of NCCL's groups: torch traces no waits for those of the second."""
    opened = SimulatedGpu(TORCH_DIST_USE_NCCL2="0")
    yield opened
    opened.close()


Tables = Mapping[str, Mapping[str, Any]]

EXPERTS: dict[str, Any] = {"family": "mixtral", "config": {"num_local_experts": 4}, "moe_dispatch": "capacity"}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "replicas": {"parallel": {"dp": 2}},
    "zero1": {"parallel": {"dp": 2, "shard": "zero1"}},
    "full": {"parallel": {"dp": 2, "shard": "full"}},
    "full, parameters on the host": {"parallel": {"dp": 2, "shard": "full", "offload": ["params", "optimizer"]}},
    "full, activations on the host": {"parallel": {"dp": 2, "shard": "full", "offload": ["activations"]}},
    "hybrid": {"parallel": {"dp": 4, "shard": "hybrid", "shard_size": 2}},
    "tensor parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "stages": {"parallel": {"pp": 2, "offload": ["activations"]}},
    "stages, split backward": {"parallel": {"pp": 2, "schedule": "zero_bubble"}},
    "ring": {"parallel": {"cp": 2, "cp_method": "ring"}},
    "gather": {"parallel": {"cp": 2, "cp_method": "gather"}},
    "experts": {"parallel": {"dp": 2, "ep": 2}, "model": EXPERTS},
    "muon": {"parallel": {"dp": 2, "shard": "zero1"}, "optim": {"name": "muon"}},
}
ALONE = {name: OPTIONS[name] for name in ("bf16", "documents", "muon", "lora", "dpo", "offload", "experts")}


def of_rank(backend: Any, tables: Tables) -> list[str]:
    """Races of two steps of the first rank, after one."""
    from nxtrain.train.build import mesh_of
    from tests.support.models import plan
    from tests.support.races import races

    backend.lay_out(mesh_of(plan("gqa2", **{"train": TRAIN, **tables}), backend))
    if backend.rank:
        return []
    resolved, state = started(backend, tables)
    step(resolved, state)
    with races() as found:
        for _ in range(2):
            step(resolved, state)
    return found


def of_ranks(tables: Tables) -> list[str]:
    """Races of the first of several ranks, with four micro-batches each."""
    world = 1
    for degree in ("dp", "tp", "pp", "cp"):
        world *= tables["parallel"].get(degree, 1)
    batch = 8 * tables["parallel"].get("dp", 1)
    return play(world, of_rank, {**tables, "train": {**TRAIN, "global_batch": batch}})[0]


def alone(tables: Tables) -> list[str]:
    """Races of one rank, of whose numbers the host reads that they are finite."""
    import torch

    from nxtrain.train import step as steps

    with opened_gpu() as backend, patch.object(steps, "not_finite", lambda _, x: torch.tensor(False).to(x.device)):
        return of_rank(backend, tables)


@pytest.mark.parametrize("name", ALONE)
def test_a_step_of_one_rank_has_no_race(gpu: SimulatedGpu, name: str) -> None:
    assert gpu.run(alone, ALONE[name]) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_several_ranks_has_no_race(gpu: SimulatedGpu, name: str) -> None:
    assert gpu.run(of_ranks, LAYOUTS[name]) == []


OPTIMIZER: Tables = {"parallel": {"offload": ["optimizer"]}}


def test_an_update_on_the_host_has_no_race(gpu: SimulatedGpu) -> None:
    assert gpu.run(alone, OPTIMIZER) == []


def with_a_wait_left_out(name: str) -> list[str]:
    """Races of a step without one of its waits."""
    from torch import Tensor

    from nxtrain.common.distributed.c10d_collectives import _Async
    from nxtrain.nn.offload import SavedTensors
    from nxtrain.optim.host_copies import HostCopies

    def free_at_once(self: SavedTensors) -> None:
        for copy in self._copies:
            copy.here = None

    def use_at_once(self: SavedTensors) -> None:
        self.begin_return()
        self._arrived = None
        before = self._before()
        if before is not None:
            before.begin_return()

    def copy_only(self: HostCopies, grads: Mapping[str, Tensor], read: Collection[str]) -> Mapping[str, Tensor]:
        copies, _ = self._memory(grads)
        for parameter, grad in grads.items():
            copies[parameter].copy_(grad, non_blocking=True)
        return copies

    if name == "activations sent":
        with patch.object(SavedTensors, "release", free_at_once):
            return alone(OPTIONS["offload"])
    if name == "activations returned":
        with patch.object(SavedTensors, "await_return", use_at_once):
            return alone(OPTIONS["offload"])
    if name == "gradients on the host":
        with patch.object(HostCopies, "fetch", copy_only):
            return alone(OPTIMIZER)
    with patch.object(_Async, "wait", lambda self: self.result):
        return of_ranks(LAYOUTS["zero1"])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("activations sent", "memory used again too early after read by aten::copy_"),
        ("activations returned", "too early after write by aten::copy_"),
        ("gradients on the host", "on the host"),
        ("collective", "too early after write by c10d::"),
    ],
)
def test_a_wait_that_is_left_out_is_a_race(gpu: SimulatedGpu, name: str, found: str) -> None:
    races = gpu.run(with_a_wait_left_out, name)
    assert any(found in race for race in races), races[:5]
