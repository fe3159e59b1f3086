"""On a fake of TorchNeuron, CPU tensors and gloo under its names, training is that of transformers, as elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.parallel import experts
from tests.support import fake_neuron
from tests.support.drawn import SEED, Drawn, draw
from tests.support.drawn_runs import (
    ON_TORCHNEURON,
    check_drawn,
    first_weights,
    on_torchneuron,
    ours,
    wanted,
)
from tests.support.layouts import FULLY_SHARDED, Degrees
from tests.support.lora import all_weights, described, draw_adapters, wanted_of_peft
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS = 2
"""The second starts from what the first has updated."""


@pytest.fixture(scope="module")
def neuron() -> Iterator[RankPool]:
    pool = RankPool("neuron-native", fake_neuron.install)
    yield pool
    pool.close()


def run(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> tuple[str, str, Course]:
    """The names of the process groups of device tensors and of host objects, and what was trained between."""
    assert backend.host_group is not None
    course = run_ours(backend, resolved, STEPS, weights)
    assert fake_neuron.device.counts.collectives
    assert not fake_neuron.device.counts.wide, "64-bit integers travel as 32-bit ones"
    return dist.get_backend(), dist.get_backend(backend.host_group), course


def check(neuron: RankPool, resolved: Resolved, *, compiled: bool | str = False, world: int = 2) -> None:
    chosen = changed(resolved, compile={"torch_compile": compiled})
    result = neuron.run(world, run, chosen, weights_of(resolved))
    assert {(device, host) for device, host, _ in result} == {("neuron", "gloo")}
    check_course([course for *_, course in result], reference(resolved, STEPS), resolved)


@pytest.mark.parametrize(("sp", "remat", "compiled"), [(False, "none", False), (True, "full", True)])
def test_tensor_parallel_training_equals_transformers(neuron: RankPool, sp: bool, remat: str, compiled: bool) -> None:
    check(neuron, layout("gqa2", tp=2, sp=sp, remat=remat), compiled=compiled)


def test_a_graph_that_gathers_its_parameters_equals_transformers(neuron: RankPool) -> None:
    check(neuron, layout("gqa2", tp=1, dp=2, micro=2, shard="full", remat="full"), compiled="step")


def test_a_pipeline_equals_transformers_and_sends_over_the_group_of_its_axis(neuron: RankPool) -> None:
    check(neuron, layout("gqa2", tp=1, pp=2, micro=1))
    assert neuron.run(2, links) == [0, 0]


def links(backend: Backend) -> int:
    """Groups of two ranks that a pipeline makes besides the groups of its axes."""
    backend.lay_out(Mesh.build(2, backend.rank, pp=2))
    assert isinstance(backend, NeuronNativeBackend)
    return len(backend.collectives._links)


# --- drawn runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(ON_TORCHNEURON)), ids=lambda index: str(ON_TORCHNEURON[index]))
def test_a_drawn_run_equals_transformers(neuron: RankPool, index: int) -> None:
    """More of them: `scripts/fuzz.py SEED N --lane native`, which begins with these."""
    drawn = on_torchneuron(draw("native", SEED, index, ON_TORCHNEURON[index]))
    courses = neuron.run(drawn.degrees.world, ours, drawn, first_weights(drawn))
    check_drawn(courses, wanted(drawn), drawn)


@pytest.mark.parametrize("degrees", [Degrees(dp=2, ep=2, shard="zero1"), Degrees(tp=2)], ids=str)
def test_experts_have_the_same_shapes_in_every_step(neuron: RankPool, degrees: Degrees) -> None:
    """Dispatch that reads numbers of rows on the host is not reached, and the run equals transformers."""
    drawn = on_torchneuron(draw("native-mixtures", SEED, 0, degrees))
    courses = neuron.run(degrees.world, without_host_dispatch, drawn, first_weights(drawn))
    check_drawn(courses, wanted(drawn), drawn)


def without_host_dispatch(backend: Backend, drawn: Drawn, weights: dict[str, Tensor]) -> Course:
    with mock.patch.object(experts, "dispatch", side_effect=AssertionError("the host reads numbers of rows")):
        return ours(backend, drawn, weights)


@pytest.mark.parametrize("degrees", [Degrees(tp=2, sequence_parallel=True), Degrees(dp=2, shard="full")], ids=str)
def test_drawn_adapters_equal_peft(neuron: RankPool, degrees: Degrees) -> None:
    drawn = on_torchneuron(draw_adapters("native-lora", SEED, 0, degrees))
    courses = neuron.run(degrees.world, ours, drawn, all_weights(drawn))
    check_drawn(courses, wanted_of_peft(drawn), drawn, described(drawn))


def test_the_drawn_layouts_hold_every_way_to_shard_and_both_schedules() -> None:
    assert {degrees.shard for degrees in ON_TORCHNEURON if degrees.dp > 1} == {"zero1", *FULLY_SHARDED}
    assert {degrees.schedule for degrees in ON_TORCHNEURON if degrees.pp > 1} == {"1f1b", "zero_bubble"}
    assert any(degrees.virtual_pp > 1 and degrees.sequence_parallel for degrees in ON_TORCHNEURON)


# --- refusals ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusals:
    """Words with which the stand-in refuses each kind of work; empty: not refused."""

    host: str
    wide: str
    subgroup_barrier: str
    unknown_group: str
    known_group: str


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return str(error)
    return ""


def refused(backend: Backend) -> Refusals:
    """Let the stand-in refuse what TorchNeuron refuses; tp is smaller than the world."""
    mesh = Mesh.build(4, backend.rank, tp=2)
    backend.lay_out(mesh)
    comm, here = backend.collectives, backend.put(torch.ones(4))
    wide = backend.put(torch.tensor([1 << 31]))
    alone, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])

    def compiled(comm: Collectives) -> Callable[[], object]:
        def body(x: Tensor) -> Tensor:
            return comm.all_gather(x, mesh.tp).sum()

        torch._dynamo.reset()
        return lambda: torch.compile(body, backend="neuron", fullgraph=True)(here)

    elsewhere = C10dCollectives(4)
    elsewhere.group(mesh.tp)  # made by rank lists, as on other devices
    return Refusals(
        host=said(lambda: comm.all_reduce(torch.ones(4), mesh.tp)),
        wide=said(lambda: comm.all_reduce(wide, mesh.tp)),
        subgroup_barrier=said(lambda: dist.barrier(alone)),
        known_group=said(compiled(comm)),
        unknown_group=said(compiled(elsewhere)),
    )


def test_the_stand_in_refuses_what_the_device_refuses(neuron: RankPool) -> None:
    for result in neuron.run(4, refused):
        assert "No backend type associated with device type cpu" in result.host
        assert "do not fit the int32" in result.wide
        assert "default process group only" in result.subgroup_barrier
        assert "replica id not seen" in result.unknown_group
        assert result.known_group == ""
