"""Timelines, against the account of goodput, on drawn histories of starts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.process.clock import Instant
from nxtrain.metrics.goodput import RunStart, TimeSpent, account
from nxtrain.tools.report.chart import WIDTH
from nxtrain.tools.report.timeline import MOST_ROWS, spans_of, timeline
from tests.support.run_folders import restarted, start

SECONDS = st.sampled_from([0.0, 0.25, 1.0, 7.5, 3600.0])


@st.composite
def histories(draw: st.DrawFn) -> list[RunStart]:
    """Starts one after the other on one machine, each of which resumes at or before the end of the one before."""
    starts: list[RunStart] = []
    at, reached = 50.0, 0
    for _ in range(draw(st.integers(1, 6))):
        resumed = draw(st.integers(0, reached))
        steps = draw(st.integers(0, 5))
        parts = [draw(SECONDS) for _ in range(4)] if steps else [0.0] * 4
        spent = TimeSpent(resumed + steps, start_s=parts[0], train_s=parts[1], eval_s=parts[2], stall_s=parts[3])
        up = at + spent.total_s + draw(SECONDS)
        outcome = draw(st.sampled_from(["done", "stopped", "failed", "killed"]))
        starts.append(RunStart(resumed, Instant("b", at, at), Instant("b", up, up), spent, outcome))
        at, reached = up + draw(SECONDS), resumed + steps
    return starts


@given(histories())
def test_spans_have_no_hole_and_add_up_to_the_account_of_goodput(starts: list[RunStart]) -> None:
    spans, result = list(spans_of(starts)), account(starts)
    sums = {
        use: math.fsum(s.end_s - s.begin_s for s in spans if s.use == use) for use in ("productive", "lost", "pause")
    }
    assert all(before.end_s == after.begin_s for before, after in pairwise(spans))
    assert sum(span.end_s - span.begin_s for span in spans) == pytest.approx(result.wall_s)
    assert sums["productive"] == pytest.approx(result.productive_s)
    assert sums["lost"] == pytest.approx(result.lost_s)
    assert sums["pause"] == pytest.approx(result.checkpoint_stall_s + result.eval_s)


@given(histories())
def test_boxes_fill_the_timeline(starts: list[RunStart]) -> None:
    drawn = timeline(starts)
    if drawn is None:
        assert account(starts).wall_s == 0
        return
    assert sum(box["width"] for box in drawn["boxes"]) == pytest.approx(WIDTH, abs=0.01 * len(drawn["boxes"]))
    assert all(0 <= at <= WIDTH for at in drawn["restarts"])
    assert len(drawn["rows"]) == len(starts)


def test_each_restart_stands_in_its_place_with_its_reason() -> None:
    starts = restarted(60, why="rank 1 was killed")
    drawn = timeline(starts)
    assert drawn is not None
    total_s = starts[1].seen.up - starts[0].began.up
    assert drawn["restarts"] == [round(WIDTH * (starts[1].began.up - starts[0].began.up) / total_s, 2)]
    assert [(*row[:4], *row[5:]) for row in drawn["rows"]] == [
        ("1", "0", "30", "10", "failed", "rank 1 was killed"),
        ("2", "20", "60", "0", "done", ""),
    ]


def test_many_starts_are_added_up_in_columns_that_keep_the_shares() -> None:
    starts, began = [], 0.0
    for number in range(500):
        starts.append(start(number, number + 10, began=began, outcome="failed"))
        began = starts[-1].seen.up + 1.0
    drawn = timeline(starts)
    assert drawn is not None
    assert drawn["added_up"]
    assert len(drawn["rows"]) == MOST_ROWS + 1
    area = sum(box["width"] * box["height"] for box in drawn["boxes"] if box["use"] == "productive") / (100 * WIDTH)
    assert area == pytest.approx(account(starts).goodput, abs=1e-3)
