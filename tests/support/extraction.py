"""Graphs that a run needs, and those that its extraction reaches; imported by name in the XLA lane's process.

The backend is that of Trainium, on a pretended machine (see `tests.support.neuron_machine`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.xla.environment import EXTRACTION
from nxtrain.backends.xla.graphs import freeze_older_objects
from nxtrain.config.check import Resolved
from nxtrain.metrics.run_observer import RunObserver
from nxtrain.optim.schedule import Schedule
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from nxtrain.train.graph_extraction import trainer
from tests.support.models import changed
from tests.support.neuron_runtime import Runtime


class Hashes:
    """A tape that keeps the hash of every graph."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def graph(self, hash_: str, text: Callable[[], str]) -> None:
        self.graphs.append(hash_)

    def host_read(self, file: str, line: int, function: str) -> None:
        # Before the first graph a read brings back what was uploaded; nothing else is known in extraction.
        assert not self.graphs, f"{file}:{line}: {function} reads a value"


def graphs_of_runs(backend: Backend, runs: list[Resolved]) -> list[str]:
    """The graphs that runs execute, one after the other."""
    tape = Hashes()
    with Runtime(tape.graph, runs=True):
        for run in runs:
            train_on(RunContext.open(opened(1, 0), run))
    return tape.graphs


def extracted(backend: Backend, run: Resolved, world: int, rank: int) -> tuple[list[str], str]:
    """The graphs that a rank reaches under `neuron_parallel_compile`, and what it says."""
    tape, said = Hashes(), StringIO()
    with (
        patch.dict(os.environ, {EXTRACTION: "1"}),
        Runtime(tape.graph, runs=False, on_read=tape.host_read),
        redirect_stderr(said),
    ):
        train_on(RunContext.open(opened(world, rank), run))
    return tape.graphs, said.getvalue()


def opened(world: int, rank: int) -> NeuronBackend:
    """The backend of Trainium for a rank of a world that its devices tell of."""
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = world, rank
    freeze_older_objects()  # else each boundary would search what the ranks before have left
    return NeuronBackend()


def compare(
    backend: Backend, runs: list[Resolved], folder: Path
) -> tuple[list[str], list[tuple[list[str], str]], list[tuple[list[str], str]]]:
    """The graphs of real runs on one rank; those of the extraction of each; and of two ranks of 4096 for the last."""
    real = graphs_of_runs(backend, runs)
    dry = [changed(run, run={"dir": folder}, data={"path": "not there"}) for run in runs]
    alone = [extracted(backend, run, 1, 0) for run in dry]
    wide = changed(dry[-1], parallel={"tp": 8, "sequence_parallel": True}, train={"global_batch": 1024})
    return real, alone, [extracted(backend, wide, 4096, rank) for rank in (0, 3001)]


def stages_compare(backend: Backend, run: Resolved) -> list[tuple[set[str], list[str]]]:
    """Of each rank of a pipeline on paper: the graphs of its whole course, and those that its extraction reaches."""
    parallel = run.config.parallel
    world = parallel.tp * parallel.pp
    return [(course(run, world, rank), extracted(backend, run, world, rank)[0]) for rank in range(world)]


def course(run: Resolved, world: int, rank: int) -> set[str]:
    """The graphs of all steps of a run, at the times that its configuration says."""
    tape = Hashes()
    device = opened(world, rank)
    mesh = mesh_of(run, device)
    state = build_state(run, build_model(run, device, mesh, init="zeros"), device, mesh)
    device.step_boundary()
    with Runtime(tape.graph, runs=False):
        trainer(run, state, run.config, Schedule.of(run.config), RunObserver()).run(0)
    return set(tape.graphs)
