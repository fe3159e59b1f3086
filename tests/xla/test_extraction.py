"""Extraction mode: `neuron_parallel_compile` gets every graph that a run will need, from one that leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

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
from tests.support.runs import run_plan
from tests.support.xla_engine import run_devices


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


Extracted = tuple[list[str], str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Extracted], list[Extracted], Path]:
    """A run of 8 steps and its resumption: ZeRO-1, accumulation, bf16 on fp32 masters, all kinds of work."""
    folder = tmp_path_factory.mktemp("extraction")
    empty = folder / "empty"
    text = folder / "text"
    text.mkdir()
    for start in range(0, 2000, 100):
        lines = "".join(f"{n} squared is {n * n}.\n" for n in range(start, start + 100))
        (text / f"{start}.txt").write_text(lines, encoding="utf-8")
    data = {"source": "text", "path": str(text), "validation_fraction": 0.2}
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": {"vocab_size": 300}},
        "train": {"eval_every": 3, "eval_batches": 2, "global_batch": 4, "micro_batch": 1},
        "checkpoint": {"every": 4},
        "parallel": {"shard": "zero1"},
        "precision": {"params": "bf16", "update": "fp32_master"},
    }
    first = run_plan(folder / "run", data, steps=8, **tables)
    again = run_plan(folder / "run", data, steps=11, **tables)
    real, alone, wide = run_devices(1, compare, [first, again], empty, folder=folder, neuron={})[0]
    return real, alone, wide, empty


def test_every_graph_of_a_run_and_of_its_resumption_is_reached(
    runs: tuple[list[str], list[Extracted], list[Extracted], Path],
) -> None:
    real, alone, _, _ = runs
    assert len(set(real)) == 6  # start with and without a checkpoint, micro-batch, update, log, evaluation
    for graphs, _ in alone:
        assert set(real) < set(graphs)
        assert len(set(graphs)) == 7  # that of converted weights, too, from which neither run started


def test_ranks_reach_the_same_graphs_in_the_same_order(
    runs: tuple[list[str], list[Extracted], list[Extracted], Path],
) -> None:
    (first, said), (other, elsewhere) = runs[2]
    assert first == other
    assert "reached the start, with and without a checkpoint, training 4 times, log 3 times" in said
    # Rank 1 is here the first of another node, where the compiler's tool reads what its own ranks say.
    assert "extracting: step 1 (training)" in elsewhere
    assert "backend " not in elsewhere


def test_nothing_is_read_or_written(runs: tuple[list[str], list[Extracted], list[Extracted], Path]) -> None:
    assert not runs[3].exists()


def test_every_stage_reaches_the_graphs_of_its_course(tmp_path: Path) -> None:
    """Five steps of a pipeline of four ranks, two chunks each stage, with all other work in between and at the end."""
    run = run_plan(
        tmp_path / "run",
        {"source": "text", "path": "not there", "validation_fraction": 0.2},
        steps=5,
        model={"config": {"vocab_size": 300, "num_hidden_layers": 4}},
        train={"eval_every": 3, "eval_batches": 2, "global_batch": 4, "micro_batch": 1},
        checkpoint={"every": 4},
        parallel={"tp": 2, "pp": 2, "virtual_pp": 2, "sequence_parallel": True, "shard": "zero1"},
    )
    (played,) = run_devices(1, stages_compare, run, folder=tmp_path, neuron={})
    for needed, reached in played:
        assert needed <= set(reached)
    (_, first), (_, second), (_, third), (_, fourth) = played
    assert first == second
    assert third == fourth
    both = set(first) & set(third)
    assert both, "transfers and sums are the same in both stages"
    assert set(first) - both
    assert set(third) - both
