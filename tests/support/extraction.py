"""Which graphs a run needs, and which its extraction reaches; imported by name in the process of the XLA lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.tracing import TracingBackend
from nxtrain.backends.xla import XlaBackend
from nxtrain.config.check import Resolved
from nxtrain.train.build import build_model, build_state, mesh_of
from nxtrain.train.rehearsal import trainer
from nxtrain.train.run import schedule_of, train_on
from tests.support.models import changed


class Hashes:
    """A tape that keeps the hash of every graph."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def graph(self, hash_: str, text: Callable[[], str]) -> None:
        self.graphs.append(hash_)

    def host_read(self, file: str, line: int, function: str) -> None:
        # Before the first graph a read brings back what was uploaded; nothing else is known in extraction.
        assert not self.graphs, f"{file}:{line}: {function} reads a value"


class Recorded(TracingBackend):
    """A device that says which graphs it runs, and runs them."""

    def __init__(self, tape: Hashes) -> None:
        super().__init__(1, 0, tape)
        self._recording = True

    def put(self, x: Tensor) -> Tensor:
        return XlaBackend.put(self, x)

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        return XlaBackend.fetch(self, values)

    def _drop(self) -> None:
        import torch_xla

        torch_xla.sync()


class StandIn(TracingBackend):
    """A stand-in for a Neuron device under `neuron_parallel_compile`: it collects graphs and computes nothing."""

    extracts = True


def graphs_of_runs(backend: Backend, runs: list[Resolved]) -> list[str]:
    """The graphs that runs execute, one after the other."""
    tape = Hashes()
    for run in runs:
        train_on(Recorded(tape), run, "chosen by the test")
    return tape.graphs


def extracted(backend: Backend, run: Resolved, world: int, rank: int) -> tuple[list[str], str]:
    """The graphs that a rank reaches in extraction mode, and what it says."""
    tape, said = Hashes(), StringIO()
    device = StandIn(world, rank, tape)
    with device.recording(), redirect_stderr(said):
        train_on(device, run, "chosen by the test")
    return tape.graphs, said.getvalue()


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
    device = TracingBackend(world, rank, tape)
    mesh = mesh_of(run, device)
    state = build_state(run, build_model(run, device, mesh, init="zeros"), device, mesh)
    with device.recording():
        trainer(run, state, run.config, schedule_of(run), lambda step, work: None).run(0)
    return set(tape.graphs)
