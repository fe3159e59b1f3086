"""Tensors between two ranks, over each transport, and what becomes of a rank whose peer dies or does not come."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.errors import NxtrainError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.deadlines import describe_limit
from tests.dist.test_collectives import DTYPES, TRANSPORTS, held_by
from tests.support.ranks import RankPool

PATIENCE_S = 1.5
ORDER = (0, 2, 1)
HELD_NUMBERS = {"gloo": 1 << 20, "shared_memory": 32 * (1 << 20) // 4}
"""Numbers that a transport may hold, so that a sender of more of them waits for its receiver."""

LAYOUTS = {
    "pp2": Mesh(2, 0, pp_size=2),
    "pp2, permuted": Mesh(2, 0, pp_size=2, order=(1, 0)),
    "pp3": Mesh(3, 0, pp_size=3),
    "pp4": Mesh(4, 0, pp_size=4),
    "pp4, permuted": Mesh(4, 0, pp_size=4, order=(2, 0, 3, 1)),
    "pp2 x tp2": Mesh(4, 0, pp_size=2, tp_size=2),
    "pp2 x dp2, permuted": Mesh(4, 0, pp_size=2, dp_size=2, order=(0, 2, 3, 1)),
}


def seen_by(mesh: Mesh, rank: int) -> Mesh:
    """The layout as another rank has it."""
    sizes = {"pp_size": mesh.pp_size, "dp_size": mesh.dp_size, "tp_size": mesh.tp_size}
    return Mesh(mesh.world, rank, **sizes, order=mesh.order)


def moved(backend: CpuBackend, layout: Mesh, transport: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Send round the ring of stages, two tensors each way under way at once, and swap with a neighbour."""
    backend.choose_transport(transport)
    comm, mesh = backend.collectives, seen_by(layout, backend.rank)
    backend.lay_out(mesh)
    pp, number = mesh.pp, held_by(backend.rank, 1, dtype=torch.float32)
    # As stages do: each begins with another axis.
    for axis in (mesh.stage, pp) if pp.rank == 0 else (pp, mesh.stage):
        comm.all_reduce(number.clone(), axis)
    x, y = (held_by(backend.rank, *shape, dtype=dtype) for shape in ((3, 2), (5,)))
    on, back = (pp.rank + 1) % pp.size, (pp.rank - 1) % pp.size
    sends = [comm.start_send(tensor, pp, on) for tensor in (x, y)]
    comes = [comm.start_receive(torch.empty_like(tensor), pp, back) for tensor in (x, y)]
    result = {"x": comes[0].wait(), "y": comes[1].wait()}
    for send in sends:
        assert send.wait() is None
    lower = pp.rank - pp.rank % 2
    if lower + 1 < pp.size:
        result["swapped"] = comm.exchange(x, pp, 2 * lower + 1 - pp.rank)
    comm.barrier()
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_stage_sends_its_neighbour_receives(
    ranks: RankPool, name: str, dtype: torch.dtype, transport: str
) -> None:
    layout = LAYOUTS[name]
    for rank, actual in enumerate(ranks.run(layout.world, moved, layout, transport, dtype)):
        pp = seen_by(layout, rank).pp
        (group,) = (group for group in pp.groups if rank in group)
        before, across = group[pp.rank - 1], group[min(pp.rank ^ 1, pp.size - 1)]
        expected = {"x": held_by(before, 3, 2, dtype=dtype), "y": held_by(before, 5, dtype=dtype)}
        if across != rank:
            expected["swapped"] = held_by(across, 3, 2, dtype=dtype)
        assert actual.keys() == expected.keys()
        for what, tensor in expected.items():
            assert torch.equal(actual[what], tensor) and actual[what].dtype == dtype, (rank, what)


def waited(backend: CpuBackend, dies: bool, transport: str) -> tuple[str, str, float]:
    """Transfer with the stage in the middle, which dies or sleeps instead; what that ends in, and after what time."""
    backend.choose_transport(transport)
    comm = backend.collectives
    comm.hang_timeout_s, comm.limit = PATIENCE_S, describe_limit(PATIENCE_S, first_use=False)
    mesh = Mesh(3, backend.rank, pp_size=3, order=ORDER)
    comm.lay_out(mesh)
    x, pp = torch.zeros(HELD_NUMBERS[transport] + 1), mesh.pp
    under_way = [comm.start_send(x, pp, (pp.rank + 1) % 3), comm.start_receive(x, pp, (pp.rank - 1) % 3)]
    for transfer in under_way:  # the connections are there, and good
        transfer.wait()
    backend.collectives.barrier()
    if pp.rank == 1:
        time.sleep(0.3)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * PATIENCE_S)
        return "", "", 0.0
    began = time.monotonic()
    try:
        (comm.start_receive(x, pp, 1) if pp.rank == 0 else comm.start_send(x, pp, 1)).wait()
    except NxtrainError as error:
        if dies:
            raise  # the rank that died ends the call, and what others return is lost
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_does_not_come_is_named_in_time(ranks: RankPool, transport: str) -> None:
    receiver, sender, middle = ranks.run(3, waited, False, transport)
    assert middle == ("", "", 0.0)
    for kind, message, seconds in (receiver, sender):
        assert kind == "HangError"
        assert message.startswith("pipeline stage 1 of 3 (rank 2) did not come within recovery.hang_timeout_s=1.5 s")
        assert PATIENCE_S * 0.9 < seconds < PATIENCE_S * 1.9


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_dies_is_named(ranks: RankPool, transport: str) -> None:
    with pytest.raises(AssertionError) as ended:
        ranks.run(3, waited, True, transport)
    receiver, sender, middle = str(ended.value).split("\nrank ")
    assert middle == "2:\ndied"
    for text in (receiver, sender):
        assert "nxtrain.common.errors.LostPeerError: pipeline stage 1 of 3 (rank 2) is gone: " in text
