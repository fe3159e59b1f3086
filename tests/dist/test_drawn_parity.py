"""Drawn shapes under every layout that can meet another: parity with transformers and `torch.optim` on one process."""

from __future__ import annotations

import pytest

from tests.support.drawn import SEED, Degrees, all_layouts, covering_array, draw
from tests.support.drawn_runs import error_of, failures, first_weights, ours, wanted
from tests.support.ranks import RankPool

LAYOUTS = covering_array(SEED, 64)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_of_any_layout_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("gloo", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    errors = [(run, error_of(courses, wanted(run), run))]
    assert not failures(errors), failures(errors)


def test_the_layouts_hold_every_two_values_that_can_meet() -> None:
    def pairs(layouts: list[Degrees]) -> set[tuple[object, ...]]:
        names = [*Degrees.__dataclass_fields__]
        return {
            (a, getattr(layout, a), b, getattr(layout, b)) for layout in layouts for a in names for b in names if a < b
        }

    assert pairs(LAYOUTS) == pairs([*all_layouts()])
    assert len(LAYOUTS) >= 60
