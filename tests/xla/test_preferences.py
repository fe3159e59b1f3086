"""DPO, ORPO and KTO on XLA devices: parity with transformers and PEFT, and graphs that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from tests.support.drawn import SEED, one_in
from tests.support.drawn_runs import error_of, failures
from tests.support.graph_mutants import traced
from tests.support.labelled import DrawnLabelled, draw_labelled, labelled_on_rank, wanted_of_labelled
from tests.support.layouts import Degrees
from tests.support.models import changed
from tests.support.pairs import DrawnPairs, PairCourse, described_pairs, draw_pairs, pairs_on_rank, wanted_of_pairs
from tests.support.parity import layout
from tests.support.xla_engine import run_devices

LAYOUTS = {
    1: [Degrees(), Degrees()],
    2: [
        Degrees(tp=2, sequence_parallel=True),
        Degrees(dp=2, shard="zero1"),
        Degrees(pp=2),
        Degrees(cp=2, cp_layout="striped", cp_method="gather"),
    ],
}


def pair_courses(backend: Backend, cases: Sequence[tuple[DrawnPairs, dict[str, Tensor]]]) -> list[PairCourse]:
    """The course of each run on a device."""
    courses = []
    for run, weights in cases:
        if isinstance(run, DrawnLabelled):
            courses.append(labelled_on_rank(backend, run, weights))
        else:
            courses.append(pairs_on_rank(backend, run, weights))
    return courses


@pytest.mark.parametrize("world", one_in(2, [2, 1]))
def test_drawn_runs_on_pairs_on_devices_equal_one_process(world: int, tmp_path: Path) -> None:
    """All runs of one number of devices share a process, which takes long to start."""
    runs = [draw_pairs("xla-pairs", SEED, index, degrees, xla=True) for index, degrees in enumerate(LAYOUTS[world])]
    labelled = [draw_labelled("xla-labelled", SEED, index, LAYOUTS[world][index], xla=True) for index in (0, 1)]
    runs += labelled
    by_rank = run_devices(world, pair_courses, [(run, run.weights()) for run in runs], folder=tmp_path)
    courses = zip(*by_rank, strict=True)
    errors = []
    for run, found in zip(runs, courses, strict=True):
        want = wanted_of_labelled(run) if isinstance(run, DrawnLabelled) else wanted_of_pairs(run)
        errors.append((run, error_of(found, want, run)))
    assert not failures(errors), (failures(errors), [described_pairs(run) for run in runs])
    assert {run.objective.adapts for run in runs} == {True, False}


def graph_plans() -> list[Resolved]:
    """Runs of DPO and KTO beside a base and beside a stored reference, and of ORPO, with several micro-batches."""
    plans = []
    for method, objective in (("lora", "dpo"), ("full", "dpo"), ("full", "orpo"), ("lora", "kto"), ("full", "kto")):
        plan = layout("gqa2", tp=2, cp=2, cp_layout="striped", cp_method="gather", micro=1, batch=4)
        plan = changed(plan, finetune={"method": method, "objective": objective, "r": 2}, data={"doc_mask": True})
        plans.append(changed(plan, backend={"name": "xla"}))
    return plans


def test_the_graphs_of_pairs_are_equal_on_all_ranks_and_read_nothing(tmp_path: Path) -> None:
    cases = [(plan, "", range(4)) for plan in graph_plans()]
    (found,) = run_devices(1, traced, 4, cases, folder=tmp_path)
    before = [0, 0, 0, 3, 2]  # for the divergence of KTO: answers by the model, perhaps by the base, and the mean
    for report, number in zip(found, before, strict=True):
        names = [graph["name"] for graph in report["graphs"]]
        wanted = [*["other steady micro-batch"] * number, "steady micro-batch", "steady update"]
        assert names[: number + 2] == wanted, names
        assert report["host_reads"] == []
        assert all(graph["ranks"] == [*range(4)] for graph in report["graphs"])
