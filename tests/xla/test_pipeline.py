"""Steps through pipelines on several XLA devices are those of transformers on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import eval_step
from tests.support.models import weights_of
from tests.support.parity import Course, batches, check_course, layout, local_batch, reference, run_ours, start
from tests.support.xla_bodies import Counts
from tests.support.xla_engine import run_devices


@dataclass(frozen=True)
class Piped:
    """Training of one rank of a pipeline."""

    course: Course
    compiled: int
    evaluated: list[list[float]]
    evaluation_compiled: int


def piped(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor], int]]) -> list[Piped]:
    """Train each case for some steps from its weights, and evaluate those."""
    return [_piped(backend, *case) for case in cases]


def _piped(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int) -> Piped:
    before = Counts.now().compiled
    course = run_ours(backend, resolved, steps, weights)
    compiled = Counts.now().compiled - before
    evaluations = []
    for _ in range(2):
        before = Counts.now().compiled
        evaluations.append(evaluated(backend, resolved, weights))
    return Piped(course, compiled, evaluations, Counts.now().compiled - before)


def evaluated(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[float]:
    """Loss and number of tokens of each micro-batch of the first batch."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    result = eval_step(state, local_batch(state, batch, resolved.config.train.micro_batch))
    return list(backend.fetch({f"{i}{j}": x for i, pair in enumerate(result) for j, x in enumerate(pair)}).values())


LAYERS = {"num_hidden_layers": 4}
STEPS = 3


@cache
def expected(shape: str, batch: int, steps: int) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1, batch=batch, config=LAYERS), steps)


def play(shape: str, cases: list[tuple[Resolved, int]], folder: Path) -> list[list[Piped]]:
    """Course of each rank in each case, equal to that of transformers."""
    first, _ = cases[0]
    parallel = first.config.parallel
    world = parallel.tp * parallel.pp * parallel.dp
    by_rank = run_devices(world, piped, [(case, weights_of(case), steps) for case, steps in cases], folder=folder)
    for (case, steps), *actual in zip(cases, *by_rank, strict=True):
        check_course([one.course for one in actual], expected(shape, case.config.train.global_batch, steps), case)
    return by_rank


def test_all_graphs_are_there_after_two_steps_of_two_micro_batches(tmp_path: Path) -> None:
    """And evaluation gives every rank the losses that one device finds."""
    cases = [
        (layout("gqa2", tp=1, pp=2, batch=batch, micro=2, config=LAYERS), steps)
        for batch, steps in ((4, 2), (4, STEPS), (8, STEPS))
    ]
    by_rank = play("gqa2", cases, tmp_path)
    alone = layout("gqa2", tp=1, batch=8, micro=2, config=LAYERS)
    (want,) = run_devices(1, evaluated, alone, weights_of(alone), folder=tmp_path)
    for short, longer, larger in by_rank:
        assert short.compiled > 0
        assert (longer.compiled, larger.compiled) == (0, 0)
        assert (longer.evaluation_compiled, larger.evaluation_compiled) == (0, 0)
        assert larger.evaluated[0] == larger.evaluated[1] == pytest.approx(want, rel=1e-6)
