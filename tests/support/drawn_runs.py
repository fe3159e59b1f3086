"""Drawn runs beside their reference, transformers with `torch.optim` on one process.

The reference computes in float64, from the same float32 weights: in float32 it is itself up to 2.4e-6 from that where
a batch has two tokens, farther than our runs in float32 are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.train.build import build_mesh
from tests.support.drawn import Drawn
from tests.support.models import weights_of
from tests.support.parity import Course, max_weight_error, reference, run_ours

LOSS, NORM, WEIGHT = 2e-6, 1e-5, 2e-5
"""Largest differences in float32: of a loss, of a norm in parts of the reference's, and of a weight."""


@dataclass(frozen=True)
class Error:
    """Largest differences of a run from its reference, over all steps and ranks."""

    loss: float
    norm: float
    weight: float

    @property
    def is_parity(self) -> bool:
        """True within the tolerances; a difference that is no number is beyond them."""
        return self.loss <= LOSS and self.norm <= NORM and self.weight <= WEIGHT

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, weight {self.weight:.1e}"


def first_weights(drawn: Drawn) -> dict[str, Tensor]:
    """Whole weights at step 0, by global name; activations neither vanish nor saturate at any width."""
    resolved = drawn.resolved
    return weights_of(resolved, std=0.4 / math.sqrt(resolved.model.hidden_size))


def wanted(drawn: Drawn, weights: Mapping[str, Tensor] | None = None) -> Course:
    """The course of the reference; None: from the first weights of the draw."""
    first = first_weights(drawn) if weights is None else weights
    return reference(drawn.resolved, drawn.steps, data=drawn.batches(), weights=first)


def ours(backend: Backend, drawn: Drawn, weights: dict[str, Tensor]) -> Course:
    """The course of one rank."""
    if isinstance(backend, CpuBackend):
        backend.choose_transport(drawn.resolved.config.backend.cpu_transport)
    return run_ours(backend, drawn.resolved, drawn.steps, weights, drawn.batches())


def error_of(courses: Sequence[Course], want: Course, drawn: Drawn) -> Error:
    """Hold the courses of all ranks against the reference."""
    loss, norm, weight = 0.0, 0.0, 0.0
    for rank, course in enumerate(courses):
        mesh = build_mesh(drawn.resolved, len(courses), rank, len(courses))
        loss = max([loss, *(abs(a - b) for a, b in zip(course.losses, want.losses, strict=True))], key=_worse)
        norm = max([norm, *(abs(a / b - 1) for a, b in zip(course.norms, want.norms, strict=True))], key=_worse)
        weight = max(weight, max_weight_error(course, want, drawn.resolved, mesh), key=_worse)
    return Error(loss, norm, weight)


def _worse(x: float) -> float:
    return math.inf if math.isnan(x) else x


def failures(errors: Sequence[tuple[Drawn, Error]]) -> str:
    """A line for each run beyond the tolerances, with the command that repeats the run."""
    return "\n".join(f"{error}: {drawn.reproduce}" for drawn, error in errors if not error.is_parity)
