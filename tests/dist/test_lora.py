"""Low-rank adapters on drawn shapes under every kind of layout: parity with PEFT and `torch.optim` on one process."""

from __future__ import annotations

import pytest

from tests.support.drawn import SEED, covering_array
from tests.support.drawn_runs import error_of, failures, ours
from tests.support.lora import all_weights, described, draw_adapters, wanted
from tests.support.ranks import RankPool

LAYOUTS = covering_array(SEED, 64)[:24]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_of_any_layout_equals_peft(ranks: RankPool, index: int) -> None:
    run = draw_adapters("lora", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    errors = [(run, error_of(courses, wanted(run), run))]
    assert not failures(errors), (failures(errors), described(run))
