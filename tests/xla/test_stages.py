"""Transfers and sums between stages on several XLA devices with real collectives, and on paper."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.graphs import hash_of, pending
from nxtrain.backends.xla.tracing import GraphRecorder, TracingBackend
from nxtrain.common.mesh import Mesh
from tests.support.models import random
from tests.support.xla_engine import run_devices

_SEARCH = threading.Lock()
"""Held from a search for a graph's tensors until that graph runs.

A search holds the tensors of all devices for a moment. What another device deletes then would be in its next graph.
"""


def seen_by(mesh: Mesh, rank: int) -> Mesh:
    """A layout as a rank has it."""
    return replace(mesh, rank=rank)


@dataclass(frozen=True)
class Graph:
    hash: str
    text: str


class _Log:
    """Boundaries of a backend, which it watches from now on."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.sync, self._apart = backend, backend._sync, False
        self.graphs: list[Graph] = []
        backend._sync, backend.collectives._boundary = self._watched, self._boundary

    def _boundary(self) -> None:
        self._backend.step_boundary()
        self._apart = not self._apart  # collectives call it before and after

    def _watched(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        # To hash waits for the graph before, and holds Python's lock meanwhile, which the other devices need.
        xm.wait_device_ops(xm.xla_real_devices([self._backend.device]))
        with _SEARCH:
            if computed := pending(self._backend.device):
                text = str(torch_xla._XLAC._get_xla_tensors_hlo(computed)) if self._apart else ""
                self.graphs.append(Graph(hash_of(computed), text))
            self.sync()


@dataclass(frozen=True)
class Handed:
    """Transfers seen by one of two stages."""

    received: list[Tensor]
    sums: list[float]
    graphs: list[str]


def handed(backend: Backend, layout: Mesh, dtype: torch.dtype) -> Handed:
    """Send what is a buffer of its own, what was just computed, and views, and swap; add numbers of all origins."""
    comm, mesh = backend.collectives, seen_by(layout, backend.rank)
    pp, first = mesh.pp, mesh.pp.rank == 0
    whole, changed = (backend.put(random(6, 3, seed=seed).to(dtype)) for seed in (0, 1))
    old = changed[1:5]
    zeros = backend.put(torch.zeros(4, 3, dtype=dtype))
    (number,) = backend.scalars(3.0)
    backend.step_boundary()
    changed.mul_(2.0)
    backend.step_boundary()
    log = _Log(backend)
    sent = [backend.put(random(4, 3, seed=2).to(dtype)), whole[:4] + 1.0, whole[1:5], old, old]
    received = []
    for x in sent:
        if first:
            comm.start_send(x, pp, 1).wait()
        else:
            received.append(comm.start_receive(zeros, pp, 0).wait())
    swapped = comm.exchange(sent[2] if first else zeros + 1.0, pp, 1 - pp.rank)
    sums = [comm.all_reduce(number if first else number * 2.0, pp)]
    sums += comm.start_all_reduce_bucket([number if first else zeros.sum()], pp, torch.float32).wait()
    read = backend.fetch({"a": sums[0], "b": sums[1]})
    return Handed(
        [x.cpu() for x in (*received, swapped)],
        [read["a"], read["b"]],
        [graph.hash for graph in log.graphs if graph.text],
    )


def traced(_: Backend, layout: Mesh, ranks: Sequence[int]) -> list[list[str]]:
    """Hashes of what each of some ranks of a pretended world records: its own work, a transfer, its own work, a sum."""
    return [_traced_rank(layout, rank) for rank in ranks]


def _traced_rank(layout: Mesh, rank: int) -> list[str]:
    hashes: list[str] = []
    tape = SimpleNamespace(graph=lambda hash_, text: hashes.append(hash_))
    backend = TracingBackend(layout.world, rank, cast(GraphRecorder, tape))
    comm, pp = backend.collectives, seen_by(layout, rank).pp
    x, zeros = (backend.put(torch.full((4, 3), value)) for value in (2.0, 0.0))
    with backend.recording():
        if pp.rank % 2 == 0:
            comm.start_send(x * float(pp.rank + 2), pp, pp.rank + 1).wait()
            x = x + 3.0
        else:
            x = comm.start_receive(zeros, pp, pp.rank - 1).wait() * 5.0
        total = comm.all_reduce(x[0], pp)
        del total
    return hashes


def sent_by_the_first(dtype: torch.dtype) -> list[Tensor]:
    whole, changed = (random(6, 3, seed=seed).to(dtype) for seed in (0, 1))
    old = changed[1:5] * 2.0
    return [random(4, 3, seed=2).to(dtype), whole[:4] + 1.0, whole[1:5], old, old]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transfer_is_one_graph_whatever_is_sent(dtype: torch.dtype, tmp_path: Path) -> None:
    layout = Mesh(2, 0, pp_size=2, order=(1, 0))
    second, first = run_devices(2, handed, layout, dtype, folder=tmp_path)
    given = sent_by_the_first(dtype)
    *received, swapped = second.received
    assert all(torch.equal(x, y) for x, y in zip(received, given, strict=True))
    assert torch.equal(swapped, given[2]) and torch.equal(first.received[0], torch.ones(4, 3, dtype=dtype))
    assert first.sums == second.sums == [9.0, 9.0]  # the first sum replaced its number
    assert first.graphs == second.graphs
    assert len(first.graphs) == len(given) + 3
    *transfers, total, bucket = first.graphs
    assert len(set(transfers)) == 1 and total == bucket not in transfers


def test_ranks_on_paper_record_the_same_transfer_and_sum_in_every_stage(tmp_path: Path) -> None:
    layout = Mesh(512, 0, pp_size=8, dp_size=8, tp_size=8)
    (result,) = run_devices(1, traced, layout, [0, 77, 191, 511], folder=tmp_path)
    assert [len(hashes) for hashes in result] == [4, 3, 4, 3], "a stage that receives has nothing to do before"
    assert len({hashes[-3] for hashes in result}) == len({hashes[-1] for hashes in result}) == 1
    assert len({hashes[-2] for hashes in result}) == 2
