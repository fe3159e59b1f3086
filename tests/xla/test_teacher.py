"""Training on a teacher's tokens on XLA devices: the steps of the reference, in one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from tests.dist.test_teacher import STEPS, data_of, expected, planned
from tests.support.models import weights_of
from tests.support.parity import Course, check_course, run_ours
from tests.support.xla_bodies import Counts
from tests.support.xla_engine import run_devices


def course(backend: Backend, resolved: Resolved, weights: dict[str, Any], data: Any) -> tuple[Course, int]:
    """Course of this device, and the graphs of all devices together."""
    backend.collectives.barrier()
    before = Counts.now().compiled
    backend.collectives.barrier()
    result = run_ours(backend, resolved, STEPS, weights, data)
    backend.collectives.barrier()
    return result, Counts.now().compiled - before


def test_two_devices_take_the_steps_of_the_reference(tmp_path: Path) -> None:
    resolved = planned("gqa2", tp=2, sp=True)
    results = run_devices(2, course, resolved, weights_of(resolved), data_of(resolved), folder=tmp_path)
    check_course([result for result, _ in results], expected("gqa2"), resolved)
    assert {graphs for _, graphs in results} == {2}, "one of the micro-batches, and one of the update"
