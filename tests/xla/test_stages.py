"""Stages that run programs of their own and meet in between, on several XLA devices with real collectives."""

from __future__ import annotations

import re
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
from nxtrain.backends.xla.tracing import Tape, TracingBackend
from nxtrain.common.mesh import Mesh
from nxtrain.parallel.regions import TensorParallel
from tests.support.models import random
from tests.support.xla_bodies import Counts
from tests.support.xla_engine import run_devices

TOKENS, WIDTH, INNER, MICRO_BATCHES, LR = 8, 6, 4, 3, 0.1

_SEARCH = threading.Lock()
"""Held from a search for a graph's tensors until that graph runs.

A search holds the tensors of all devices for a moment. What another device deletes then would be in its next graph.
"""


def seen_by(mesh: Mesh, rank: int) -> Mesh:
    """A layout as a rank has it."""
    return replace(mesh, rank=rank)


def weights(stage: int) -> tuple[Tensor, Tensor]:
    return random(WIDTH, INNER, seed=stage, scale=0.25), random(INNER, WIDTH, seed=100 + stage, scale=0.25)


def inputs(micro_batch: int) -> Tensor:
    return random(TOKENS, WIDTH, seed=1000 + micro_batch)


@dataclass(frozen=True)
class Graph:
    hash: str
    text: str


@dataclass(frozen=True)
class Played:
    """Results of some steps of a pipeline on one rank."""

    losses: list[float]
    norms: list[float]
    compiled: list[int]
    graphs: list[list[Graph]]


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


def stages(backend: Backend, layout: Mesh, steps: int) -> Played:
    """Train a chain of blocks, each stage with one more than the one before it, so that no two run the same program."""
    log = _Log(backend)
    comm, mesh = backend.collectives, seen_by(layout, backend.rank)
    backend.lay_out(mesh)
    pp, tp = mesh.pp, mesh.tp
    regions = TensorParallel(tp, comm, backend.kernels, torch.float32, sequence_parallel=True)
    whole_up, whole_down = weights(pp.rank)
    up = backend.put(whole_up.chunk(tp.size, 1)[tp.rank].clone()).requires_grad_()
    down = backend.put(whole_down.chunk(tp.size, 0)[tp.rank].clone()).requires_grad_()
    zeros = backend.put(torch.zeros(TOKENS // tp.size, WIDTH))
    given = [backend.put(inputs(i).chunk(tp.size)[tp.rank].clone()) for i in range(MICRO_BATCHES)]
    played = Played([], [], [], [])
    for _ in range(steps):
        up.grad = down.grad = None
        loss = backend.put(torch.zeros(1))
        under_way = []
        for micro_batch in range(MICRO_BATCHES):
            x = given[micro_batch] if pp.rank == 0 else comm.start_receive(zeros, pp, pp.rank - 1).wait()
            x = x.detach().requires_grad_()
            y = x
            for _ in range(pp.rank + 1):
                y = y + regions.exit(torch.tanh(regions.enter(y) @ up) @ down)
            under_way.append((x, y))
            if pp.rank < pp.size - 1:
                comm.start_send(y.detach(), pp, pp.rank + 1).wait()
        for x, y in under_way:
            if pp.rank == pp.size - 1:
                part = y.square().mean() / (MICRO_BATCHES * tp.size)
                part.backward()
                loss = loss + part.detach()
            else:
                y.backward(comm.start_receive(zeros, pp, pp.rank + 1).wait())
            if pp.rank:
                assert x.grad is not None
                comm.start_send(x.grad, pp, pp.rank - 1).wait()
        grads = [param.grad for param in (up, down) if param.grad is not None]
        squares = torch.stack([grad.square().sum() for grad in grads]).sum().reshape(1)
        total, square = comm.start_all_reduce_bucket([loss, squares], mesh.model, torch.float32).wait()
        ones = comm.all_reduce(backend.put(torch.ones(2)), pp)
        with torch.no_grad():
            norm = square.sqrt()
            for param, grad in zip((up, down), grads, strict=True):
                param.sub_(LR * grad / (1.0 + norm) * (ones[:1] / pp.size))
        found = backend.fetch({"loss": total[0], "norm": norm[0]})
        played.losses.append(found["loss"])
        played.norms.append(found["norm"])
        played.compiled.append(Counts.now().compiled)
        played.graphs.append(log.graphs)
        log.graphs = []
    return played


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
    backend = TracingBackend(layout.world, rank, cast(Tape, tape))
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


def expected(num_stages: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses and norms of the same steps in float64, on whole tensors in one process."""
    params = [x.double().requires_grad_() for stage in range(num_stages) for x in weights(stage)]
    losses, norms = [], []
    for _ in range(steps):
        loss = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            y = inputs(micro_batch).double()
            for stage in range(num_stages):
                for _ in range(stage + 1):
                    y = y + torch.tanh(y @ params[2 * stage]) @ params[2 * stage + 1]
            loss = loss + y.square().mean() / MICRO_BATCHES
        grads = torch.autograd.grad(loss, params)
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(LR * grad / (1.0 + norm))
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


STEPS = 3
LAYOUTS = {
    "pp2 x tp2": Mesh(4, 0, pp_size=2, tp_size=2),
    "pp2 x tp2, permuted": Mesh(4, 0, pp_size=2, tp_size=2, order=(1, 2, 3, 0)),
    "pp4": Mesh(4, 0, pp_size=4),
}
COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|collective-permute)\(")


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_of_different_programs_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    played = run_devices(4, stages, layout, STEPS, folder=tmp_path)
    losses, norms = expected(layout.pp_size, STEPS)
    own: dict[int, set[str]] = {}
    for rank, found in enumerate(played):
        assert found.losses == pytest.approx(losses, rel=2e-6)
        assert found.norms == pytest.approx(norms, rel=2e-6)
        assert found.compiled == [found.compiled[0]] * STEPS, "the first step has compiled all"
        assert found.graphs == [found.graphs[0]] * STEPS
        stage = seen_by(layout, rank).pp.rank
        graphs = {graph.hash for graph in found.graphs[0][:-3] if not graph.text}  # the last: two sums, and the update
        assert own.setdefault(stage, graphs) == graphs, "ranks of a stage run the same"
        edges = 1 if stage in (0, layout.pp_size - 1) else 2
        assert sum(bool(graph.text) for graph in found.graphs[0]) == 2 * MICRO_BATCHES * edges + 2
    assert not set.intersection(*own.values()), "the stages differ, else this shows nothing"

    apart = {graph.hash: graph.text for found in played for graph in found.graphs[0] if graph.text}
    kinds = sorted(COLLECTIVES.findall(text) for text in apart.values())
    transfers = [["all-gather"]] * (1 if layout.pp_size == 2 else 2)
    assert [kind for kind in kinds if kind == ["all-gather"]] == transfers, "one program for all stages and both ways"
    assert len(kinds) == len(transfers) + 2, "and one for each kind of sum"


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
    (found,) = run_devices(1, traced, layout, [0, 77, 191, 511], folder=tmp_path)
    assert [len(hashes) for hashes in found] == [4, 3, 4, 3], "a stage that receives has nothing to do before"
    assert len({hashes[-3] for hashes in found}) == len({hashes[-1] for hashes in found}) == 1
    assert len({hashes[-2] for hashes in found}) == 2
