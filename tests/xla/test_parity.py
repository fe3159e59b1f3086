"""The steps of transformers with torch's AdamW, on several XLA devices with real collectives."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from nxtrain.config.check import Resolved
from tests.support.models import weights_of
from tests.support.parity import Course, check_course, layout, reference
from tests.support.xla_bodies import courses, mutated_courses
from tests.support.xla_engine import run_devices

STEPS = 6

LAYOUTS: dict[int, list[tuple[str, int, int, bool, int]]] = {  # shape, tp, dp, sequence parallel, micro batch
    2: [
        ("gqa2", 2, 1, False, 4),
        ("gqa2", 2, 1, True, 2),
        ("gqa2", 1, 2, False, 2),
        ("odd", 2, 1, True, 4),
        ("tied", 2, 1, False, 4),
        ("llama3-rope", 2, 1, True, 4),
    ],
    4: [("gqa2", 2, 2, True, 1), ("gqa2", 4, 1, True, 4), ("mqa", 4, 1, False, 4)],
    8: [("gqa2", 4, 2, True, 2), ("gqa2", 2, 4, False, 1)],
}


@cache
def expected(shape: str) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1), STEPS)


@pytest.mark.parametrize("world", LAYOUTS)
def test_steps_equal_transformers(world: int, tmp_path: Path) -> None:
    cases: list[Resolved] = [
        layout(shape, tp=tp, dp=dp, sp=sp, micro=micro) for shape, tp, dp, sp, micro in LAYOUTS[world]
    ]
    by_rank = run_devices(world, courses, [(case, weights_of(case)) for case in cases], STEPS, folder=tmp_path)
    for index, (case, (shape, *_)) in enumerate(zip(cases, LAYOUTS[world], strict=True)):
        check_course([by_rank[rank][index] for rank in range(world)], expected(shape), case)


@pytest.mark.parametrize("mutant", ["world", "norm"])
def test_a_wrong_divisor_or_a_lost_sum_would_be_noticed(mutant: str, tmp_path: Path) -> None:
    """Averaging over the world instead of dp, and norm weights that keep the gradient of their own slice."""
    case = layout("gqa2", tp=2, dp=2, sp=True, micro=2)
    by_rank = run_devices(4, mutated_courses, case, weights_of(case), STEPS, mutant, folder=tmp_path)
    with pytest.raises(AssertionError):
        check_course(by_rank, expected("gqa2"), case)
