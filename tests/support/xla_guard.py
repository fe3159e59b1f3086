"""Bodies with non-finite steps and with checksums for a device of the XLA lane; imported in its process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.errors import NxtrainError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.signals import Signals
from nxtrain.common.testing.fault_kinds import flip
from nxtrain.config.check import Resolved
from nxtrain.metrics.run_observer import Observers, RunObserver, Work
from nxtrain.optim.schedule import Schedule
from nxtrain.train import graph_extraction
from nxtrain.train.build import build_mesh, build_model, build_state
from nxtrain.train.health.numerics import NumericsGuard
from nxtrain.train.health.recompiles import WARM_UP, Recompiles
from nxtrain.train.health.replica_check import ReplicaCheck, checksums, factors
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.supervision.watchdog import Watchdog
from tests.support.models import tokens
from tests.support.parity import GLOBAL_BATCH, LR, batches, local_batch, start
from tests.support.xla_bodies import Counts


@dataclass(frozen=True)
class Skipping:
    """A run whose third and fourth steps are bad.

    Args:
        changed: By step, which tensors the update changed a bit of.
        history: Losses and norms of the last steps.
        compiled: Graphs that were new, by step.
        fallbacks: Operations that left a graph.
    """

    changed: list[list[str]]
    history: list[list[float]]
    compiled: list[int]
    fallbacks: tuple[str, ...]


def skipping(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Skipping:
    """Take six steps; in the bad ones one weight is NaN or infinite, and right again after them."""
    state = start(backend, resolved, weights)
    batch = local_batch(state, tokens(resolved, GLOBAL_BATCH), resolved.config.train.micro_batch)
    norm = dict(state.model.named_parameters())["model.norm.weight"]
    changed, compiled = [], []
    for step in range(1, 7):
        right = norm.detach().cpu()
        if step in {3, 4}:
            wrong = right.clone()
            wrong[0] = float("nan" if step == 3 else "inf")
            with torch.no_grad():
                norm.copy_(backend.put(wrong))
        backend.step_boundary()
        before, counted = _held(state), Counts.now().compiled
        train_step(state, batch, LR)
        backend.step_boundary()
        compiled.append(Counts.now().compiled - counted)
        after = _held(state)
        changed.append([name for name, x in before.items() if not torch.equal(x, after[name])])
        if step in {3, 4}:
            with torch.no_grad():
                norm.copy_(backend.put(right))
    backend.step_boundary()
    return Skipping(changed, state.history.entries.cpu().tolist(), compiled, Counts.now().fallbacks)


def skippings(backend: Backend, cases: list[tuple[Resolved, Mapping[str, Tensor]]]) -> list[Skipping]:
    """`skipping` of each case."""
    return [skipping(backend, *case) for case in cases]


def _held(state: TrainState) -> dict[str, Tensor]:
    kinds: dict[str, Mapping[str, Tensor]] = {"param": dict(state.model.named_parameters()), **state.optimizer.state}
    if state.layout.mesh.shard_size > 1:
        kinds["shard"] = dict(state.data_parallel.shards)
    bits = {2: torch.int16, 4: torch.int32}
    return {
        f"{kind} {name}": x.detach().cpu().view(bits[x.dtype.itemsize])
        for kind, tensors in kinds.items()
        for name, x in tensors.items()
    }


def summed(backend: Backend, tensors: Mapping[str, Tensor]) -> list[int]:
    """Their checksums on the device."""
    there = {name: backend.put(x) for name, x in tensors.items()}
    found = checksums(there, backend.kernels, backend.put(factors(64)))
    backend.step_boundary()
    assert not Counts.now().fallbacks
    return [int(number) for number in found.cpu()]


@dataclass(frozen=True)
class Voted:
    """A run whose replicas vote.

    Args:
        told: How it ended; empty: well.
        compiled, launched, read: Graphs that were new or run, and transfers to the host, on all devices together.
    """

    told: str
    compiled: int
    launched: int
    read: int


def voted(backend: Backend, resolved: Resolved, flipped: tuple[int, int] | None = None) -> Voted:
    """Train; with a rank and a step at whose vote a bit of that rank's first parameter has turned over."""
    mesh = build_mesh(resolved, backend.world, backend.rank, backend.local_world)
    state = build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)
    backend.step_boundary()
    recompiles = Recompiles(backend, resolved.config.compile.max_recompiles)

    class Flip(RunObserver):
        def enter(self, step: int, work: Work) -> None:
            if work == "vote" and (backend.rank, step) == flipped:
                flip(state.model)

    observers = Observers(recompiles, Flip())
    schedule = Schedule(1e-3, 1e-3, 0, 8, "constant")
    loop = graph_extraction.trainer(resolved, state, resolved.config, schedule, observers)
    loop = replace(loop, guard=NumericsGuard(resolved.config, state))
    backend.collectives.barrier()
    before, read = Counts.now(), _read()
    told = ""
    backend.collectives.barrier()
    try:
        loop.run(0)
    except NxtrainError as error:
        told = f"{type(error).__name__}: {error}"
    backend.collectives.barrier()
    after = Counts.now()
    found = Voted(told, after.compiled - before.compiled, after.launched - before.launched, _read() - read)
    backend.collectives.barrier()  # the next run counts for itself
    return found


def votes(backend: Backend, cases: Sequence[tuple[Resolved, tuple[int, int] | None]]) -> list[Voted]:
    """`voted` of each case."""
    return [voted(backend, *case) for case in cases]


def _read() -> int:
    """Transfers to the host so far."""
    import torch_xla.debug.metrics as met

    found = met.metric_data("TransferFromDeviceTime")
    return int(found[0]) if found else 0


def hung(backend: Backend, logs: Path) -> None:
    """Wait on the device for the last rank, which never comes, with a watchdog beside the first."""
    axis = Mesh.build(backend.world, backend.rank).dp
    mine = backend.put(torch.ones(2))
    if backend.rank == backend.world - 1:
        time.sleep(60.0)
    watchdog = Watchdog(backend, 1.5, logs, Signals())
    for step in range(1, WARM_UP + 2):  # what may still compile has longer
        watchdog.enter(step, "training")
    with watchdog if backend.rank == 0 else nullcontext():
        backend.fetch({"sum": backend.collectives.all_reduce(mine, axis).sum()})


def compared(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], flips: Sequence[tuple[int, str]]
) -> tuple[list[list[str]], list[int]]:
    """Findings of the vote on sound copies after a step, and with a bit turned over in each of some parameters.

    Args:
        backend: Of the device.
        resolved: The run.
        weights: Whole, at the start.
        flips: A rank and a parameter of that rank each.

    Returns:
        The words of each vote, and the graphs that were new in each, on all devices together.
    """
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    backend.step_boundary()
    vote = ReplicaCheck(state)
    assert vote.is_possible
    words, compiled = [], []
    for rank, name in [(-1, ""), *flips]:
        right = None
        if rank == backend.rank:
            parameter = dict(state.model.named_parameters())[name]
            right = parameter.detach().cpu()
            _set(backend, parameter, _with_another_bit(right))
        backend.collectives.barrier()
        before = Counts.now().compiled
        backend.collectives.barrier()
        of_all, differing = vote.gather()
        number = backend.fetch({"differing": differing})["differing"]
        backend.collectives.barrier()
        compiled.append(Counts.now().compiled - before)
        words.append([str(found) for found in vote.dissents(of_all)] or ["elsewhere"] * bool(number))
        if right is not None:
            _set(backend, parameter, right)
    assert not Counts.now().fallbacks
    return words, compiled


def _with_another_bit(x: Tensor) -> Tensor:
    bits = x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).clone()
    bits[-1:] ^= 1
    return bits.view(x.dtype)


def _set(backend: Backend, parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(backend.put(value))
    backend.step_boundary()
