"""On a fake of TorchNeuron, CPU tensors and gloo under its names, training is that of transformers, as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from tests.support import fake_neuron
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS = 5


@pytest.fixture(scope="module")
def neuron() -> Iterator[RankPool]:
    """Ranks on the fake."""
    pool = RankPool("neuron-native", fake_neuron.install)
    yield pool
    pool.close()


def run(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[str, str, Course]:
    """The names of the process groups of device tensors and of host objects, and what was trained between."""
    assert backend.host_group is not None
    return dist.get_backend(), dist.get_backend(backend.host_group), run_ours(backend, resolved, STEPS, weights)


def check(neuron: RankPool, resolved: Resolved, *, compiled: bool = False) -> None:
    ours = changed(resolved, compile={"torch_compile": compiled})
    found = neuron.run(2, run, ours, weights_of(resolved))
    assert {(device, host) for device, host, _ in found} == {("neuron", "gloo")}
    check_course([course for *_, course in found], reference(resolved, STEPS), resolved)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("sp", "remat"), [(False, "none"), (True, "full")])
def test_tensor_parallel_training_equals_transformers(neuron: RankPool, sp: bool, remat: str, compiled: bool) -> None:
    check(neuron, layout("gqa2", tp=2, sp=sp, remat=remat), compiled=compiled)


@pytest.mark.parametrize("shard", ["zero1", "full"])
def test_sharded_training_equals_transformers(neuron: RankPool, shard: str) -> None:
    check(neuron, layout("gqa2", tp=1, dp=2, micro=2, shard=shard))
