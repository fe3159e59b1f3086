"""Extraction mode: `neuron_parallel_compile` gets every graph that a run will need, from one that leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.extraction import compare, stages_compare
from tests.support.runs import run_plan
from tests.support.xla_engine import run_devices

Extracted = tuple[list[str], str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Extracted], list[Extracted], Path]:
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
    found: tuple[list[str], list[Extracted], list[Extracted], Path],
) -> None:
    real, alone, _, _ = found
    assert len(set(real)) == 6  # start with and without a checkpoint, micro-batch, update, log, evaluation
    for graphs, _ in alone:
        assert set(real) < set(graphs)
        assert len(set(graphs)) == 7  # that of converted weights, too, from which neither run started


def test_ranks_reach_the_same_graphs_in_the_same_order(
    found: tuple[list[str], list[Extracted], list[Extracted], Path],
) -> None:
    (first, said), (other, elsewhere) = found[2]
    assert first == other
    assert "reached the start, with and without a checkpoint, training 4 times, log 3 times" in said
    # Rank 1 is here the first of another node, where the compiler's tool reads what its own ranks say.
    assert "extracting: step 1 (training)" in elsewhere
    assert "backend " not in elsewhere


def test_nothing_is_read_or_written(found: tuple[list[str], list[Extracted], list[Extracted], Path]) -> None:
    assert not found[3].exists()


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
