"""Models with experts under every layout that can meet another: parity with transformers in one process."""

from __future__ import annotations

import pytest

from tests.support.drawn import MIXTURES, SEED, covering_array, draw, one_in
from tests.support.drawn_runs import error_of, failures, first_weights, ours, wanted
from tests.support.ranks import RankPool

LAYOUTS = [*covering_array(SEED + 1, 64), *covering_array(SEED + 1, 48, cp=True)]


@pytest.mark.parametrize("index", one_in(4, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_with_experts_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("mixtures", SEED, index, LAYOUTS[index], family=MIXTURES[index % 2])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    errors = [(run, error_of(courses, wanted(run), run))]
    assert not failures(errors), failures(errors)
