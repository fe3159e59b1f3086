"""DPO and ORPO on every kind of layout: parity with transformers, PEFT and `torch.optim` on one process."""

from __future__ import annotations

import pytest

from tests.support.drawn import SEED, Degrees, covering_array
from tests.support.drawn_runs import error_of, failures
from tests.support.pairs import (
    PairCourse,
    counts_of,
    described_pairs,
    draw_pairs,
    pairs_on_rank,
    wanted_of_pairs,
)
from tests.support.ranks import RankPool

_SMALL = [degrees for degrees in covering_array(SEED, 64) if degrees.world <= 4]
_CONTEXT = [degrees for degrees in covering_array(SEED, 48, cp=True) if degrees.world <= 4]
LAYOUTS = [
    *[degrees for degrees in _SMALL if degrees.tp > 1 and not degrees.sequence_parallel][:4],
    *[degrees for degrees in _SMALL if degrees.sequence_parallel][:3],
    *[degrees for degrees in _SMALL if degrees.pp > 1 and degrees.virtual_pp > 1][:2],
    *[degrees for degrees in _SMALL if degrees.schedule == "zero_bubble"][:2],
    Degrees(tp=2, dp=2, shard="zero1", sequence_parallel=True),
    Degrees(dp=3, shard="zero1"),
    Degrees(dp=3, shard="grad_op"),
    Degrees(dp=2, shard="full"),
    Degrees(pp=2, dp=2, shard="full"),
    Degrees(dp=4, shard="hybrid"),
    *_CONTEXT[:4],
    Degrees(tp=2, cp=2, cp_layout="zigzag", cp_method="ring", sequence_parallel=True),
    Degrees(pp=2, cp=2, cp_layout="striped", cp_method="gather"),
]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_on_pairs_of_any_layout_equals_one_process(ranks: RankPool, index: int) -> None:
    run = draw_pairs("pairs", SEED, index, LAYOUTS[index])
    courses: list[PairCourse] = ranks.run(run.degrees.world, pairs_on_rank, run, run.weights())
    errors = [(run, error_of(courses, wanted_of_pairs(run), run))]
    assert not failures(errors), (failures(errors), described_pairs(run))
    for course in courses:
        assert [others["pairs"] for others in course.others] == counts_of(run)
        assert course.others == courses[0].others
