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
from tests.support.xla_processes import FAST, OPTIMIZED

STEPS = 3
"""The third starts from moments and weights that two updates have made."""

Case = tuple[str, int, int, bool, int, str]
"""Shape, tp, dp, sequence parallel, micro batch, cut."""

LAYOUTS: dict[int, list[Case]] = {
    2: [
        ("gqa2", 2, 1, False, 4, "none"),
        ("gqa2", 2, 1, True, 2, "none"),
        ("gqa2", 1, 2, False, 2, "none"),
        ("odd", 2, 1, True, 4, "none"),
        ("tied", 2, 1, False, 4, "none"),
        ("llama3-rope", 2, 1, True, 4, "none"),
        ("odd", 1, 2, False, 1, "zero1"),
    ],
    4: [
        ("gqa2", 2, 2, True, 1, "none"),
        ("gqa2", 4, 1, True, 4, "none"),
        ("mqa", 4, 1, False, 4, "none"),
        ("gqa2", 2, 2, True, 2, "zero1"),
    ],
    8: [("gqa2", 4, 2, True, 2, "none"), ("gqa2", 2, 4, False, 1, "none")],
}
OPTIMIZED_LAYOUTS: list[Case] = [("gqa2", 2, 1, True, 2, "none"), ("odd", 1, 2, False, 1, "zero1")]
MUTATED = layout("gqa2", tp=2, dp=2, sp=True, micro=2)


@cache
def expected(shape: str, steps: int = STEPS, blocks: int = 2) -> Course:
    """The reference course of a shape, run once."""
    return reference(layout(shape, tp=1, config={"num_hidden_layers": blocks}), steps)


@pytest.mark.parametrize("world", LAYOUTS)
def test_steps_equal_transformers_and_are_the_same_graphs_on_all_devices(world: int, tmp_path: Path) -> None:
    _hold(world, LAYOUTS[world], tmp_path, FAST)


def _hold(world: int, layouts: list[Case], folder: Path, flags: str, blocks: int = 2) -> None:
    """Train each layout in one process of some devices, and hold each course against transformers'."""
    model = {"num_hidden_layers": blocks}
    cases: list[Resolved] = [
        layout(shape, tp=tp, dp=dp, sp=sp, micro=micro, shard=shard, config=model)
        for shape, tp, dp, sp, micro, shard in layouts
    ]
    jobs = [(case, weights_of(case)) for case in cases]
    by_rank = run_devices(world, courses, jobs, STEPS, folder=folder, flags=flags)
    for case, (shape, *_), found in zip(cases, layouts, zip(*by_rank, strict=True), strict=True):
        check_course([course for course, _ in found], expected(shape, blocks=blocks), case)
        run = case.config.train
        accumulates = run.global_batch > run.micro_batch * case.config.parallel.dp
        assert {graphs for _, graphs in found} == {2 if accumulates else 1}


def test_optimized_steps_equal_transformers(tmp_path: Path) -> None:
    """The code that XLA:CPU makes for a user; all other cases compile without LLVM's passes.

    Of one block, since the code of a second is that of the first.
    """
    _hold(2, OPTIMIZED_LAYOUTS, tmp_path, OPTIMIZED, blocks=1)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Course]]:
    """By rank, one step of each mutant."""
    folder = tmp_path_factory.mktemp("mutants")
    return run_devices(4, mutated_courses, MUTATED, weights_of(MUTATED), 1, ["world", "norm"], folder=folder)


def test_an_average_over_the_world_instead_of_dp_would_be_noticed(mutants: list[dict[str, Course]]) -> None:
    found = [rank["world"] for rank in mutants]
    assert found[0].losses == pytest.approx(expected("gqa2", 1).losses, rel=0, abs=2e-6)
    assert found[0].norms == pytest.approx([norm / 2 for norm in expected("gqa2", 1).norms], rel=1e-5)
    with pytest.raises(AssertionError):
        check_course(found, expected("gqa2", 1), MUTATED)


def test_zero1_that_averages_over_the_world_would_be_noticed(tmp_path: Path) -> None:
    resolved = layout("gqa2", tp=2, dp=2, sp=True, micro=2, shard="zero1")
    (first, *_) = run_devices(4, mutated_courses, resolved, weights_of(resolved), 1, ["", "world"], folder=tmp_path)
    assert first[""].norms == pytest.approx(expected("gqa2", 1).norms, rel=1e-5)
    assert first["world"].norms == pytest.approx([norm / 2 for norm in expected("gqa2", 1).norms], rel=1e-5)


def test_norm_weights_that_keep_the_gradient_of_their_own_slice_would_be_noticed(
    mutants: list[dict[str, Course]],
) -> None:
    found = [rank["norm"] for rank in mutants]
    assert found[0].losses == pytest.approx(expected("gqa2", 1).losses, rel=0, abs=2e-6)
    with pytest.raises(AssertionError):
        check_course(found, expected("gqa2", 1), MUTATED)
