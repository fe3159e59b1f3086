"""The steps of transformers with torch's AdamW, on several XLA devices with real collectives."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference
from tests.support.xla_bodies import courses, mutated_courses
from tests.support.xla_engine import run_devices
from tests.support.xla_processes import OPTIMIZED

STEPS = 3
"""The third starts from moments and weights that two updates have made."""

MUTATED = layout("gqa2", tp=2, dp=2, sp=True, micro=2)


@cache
def first_step() -> Course:
    """One step of transformers."""
    return reference(MUTATED, 1)


def test_optimized_steps_equal_transformers(tmp_path: Path) -> None:
    """The code that XLA:CPU makes for a user; all other cases compile without LLVM's passes."""
    cases = [layout("gqa2", tp=2, sp=True, micro=2), layout("odd", tp=1, dp=2, micro=1, shard="zero1")]
    cases[1] = changed(cases[1], train={"z_loss": 1e-2}, metrics={"noise_scale": True})
    jobs = [(case, weights_of(case)) for case in cases]
    by_rank = run_devices(2, courses, jobs, STEPS, folder=tmp_path, flags=OPTIMIZED)
    for case, result in zip(cases, zip(*by_rank, strict=True), strict=True):
        check_course([course for course, _ in result], reference(case, STEPS), case)
        assert {graphs for _, graphs in result} == {2}, "one per micro-batch but the first, and one for the update"


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Course]]:
    """By rank, one step of each mutant."""
    folder = tmp_path_factory.mktemp("mutants")
    return run_devices(4, mutated_courses, MUTATED, weights_of(MUTATED), 1, ["world", "norm"], folder=folder)


def test_an_average_over_the_world_instead_of_dp_would_be_noticed(mutants: list[dict[str, Course]]) -> None:
    result = [rank["world"] for rank in mutants]
    assert result[0].losses == pytest.approx(first_step().losses, rel=0, abs=2e-6)
    assert result[0].norms == pytest.approx([norm / 2 for norm in first_step().norms], rel=1e-5)
    with pytest.raises(AssertionError):
        check_course(result, first_step(), MUTATED)


def test_zero1_that_averages_over_the_world_would_be_noticed(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=2, dp=2, sp=True, micro=2, shard="zero1")
    (first, *_) = run_devices(4, mutated_courses, resolved, weights_of(resolved), 1, ["", "world"], folder=tmp_path)
    assert first[""].norms == pytest.approx(first_step().norms, rel=1e-5)
    assert first["world"].norms == pytest.approx([norm / 2 for norm in first_step().norms], rel=1e-5)


def test_norm_weights_that_keep_the_gradient_of_their_own_slice_would_be_noticed(
    mutants: list[dict[str, Course]],
) -> None:
    result = [rank["norm"] for rank in mutants]
    assert result[0].losses == pytest.approx(first_step().losses, rel=0, abs=2e-6)
    with pytest.raises(AssertionError):
        check_course(result, first_step(), MUTATED)
