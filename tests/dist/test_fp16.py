"""Training in fp16 against torch.amp.GradScaler and AdamW in one process, with steps that overflow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.drawn import SEED, draw, one_in
from tests.support.drawn_fp16 import STEPS, Reference, differences, draw_fp16, of_fp16, run
from tests.support.layouts import Degrees, covering_array
from tests.support.models import changed, weights_of
from tests.support.parity import layout
from tests.support.ranks import RankPool

CUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "tp": 2, "shard": "zero1"},
    "full": {"dp": 2, "shard": "full"},
    "hybrid": {"dp": 4, "shard": "hybrid"},
    "pp2": {"pp": 2},
    "zero bubble": {"pp": 2, "schedule": "zero_bubble"},
}

LAYOUTS = covering_array(SEED, 8, lambda degrees: degrees.world <= 4)
DRAWN = 8


@pytest.mark.parametrize(("index", "cut"), [*enumerate(CUTS.values())], ids=CUTS)
def test_drawn_shapes_train_as_with_torchs_scaler(ranks: RankPool, index: int, cut: dict[str, Any]) -> None:
    # Steps that are large beside rounding in fp16.
    resolved = changed(of_fp16(draw("fp16", 7, index, Degrees(**cut)).resolved), optim={"lr": 1e-2, "eps": 1e-5})
    want = Reference(resolved).run()
    courses = ranks.run(Degrees(**cut).world, run, resolved, weights_of(resolved))
    assert 0 < want.updates[-1] < STEPS, "some steps overflow, and some do not"
    assert differences(courses, resolved, want)
    for course in courses:
        assert [change > 0 for change in course.change] == [norm < float("inf") for norm in want.norms]


@pytest.mark.parametrize("index", one_in(4, range(DRAWN)))
def test_drawn_layouts_and_scales_train_as_with_torchs_scaler(ranks: RankPool, index: int) -> None:
    degrees = LAYOUTS[index]
    resolved = draw_fp16("fp16", SEED, index, degrees)
    assert differences(ranks.run(degrees.world, run, resolved, weights_of(resolved)), resolved)


@pytest.mark.parametrize("cut", [CUTS["dp2"], CUTS["full"], {"tp": 2}, {"dp": 2, "shard": "zero1"}], ids=str)
def test_an_overflow_of_one_rank_skips_the_step_on_all(ranks: RankPool, cut: dict[str, Any]) -> None:
    resolved = layout("odd", tp=cut.get("tp", 1), dp=cut.get("dp", 1), micro=1, shard=cut.get("shard", "none"))
    types = {"params": "fp16", "update": "fp32_master", "loss_scale": 8.0, "loss_scale_every": 100}
    resolved = changed(resolved, precision=types)
    for result in ranks.run(2, run, resolved, weights_of(resolved), 2):
        assert result.scales == [8.0, 8.0, *[4.0] * 6]
        assert result.updates == [1, 2, 2, 3, 4, 5, 6, 7]
        assert [change > 0 for change in result.change] == [True, True, False, *[True] * 5]
