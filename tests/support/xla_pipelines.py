"""Training and evaluation through pipelines on XLA devices; imported by name in their process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import eval_step
from tests.support.parity import Course, batches, local_batch, run_ours, start
from tests.support.xla_bodies import Counts


@dataclass(frozen=True)
class Piped:
    """Training of one rank of a pipeline.

    Args:
        course: Its training.
        compiled: Graphs that were new in it, on all devices together; what is known is so to the whole process.
        evaluated: Loss and number of tokens of each micro-batch of the first batch, with the first weights; twice.
        evaluation_compiled: Graphs that were new in the second of these evaluations.
    """

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
    found = eval_step(state, local_batch(state, batch, resolved.config.train.micro_batch))
    return list(backend.fetch({f"{i}{j}": x for i, pair in enumerate(found) for j, x in enumerate(pair)}).values())
