"""Times by kind of work, against a brute-force reading of drawn histories on a clock that the test moves."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.metrics.run_observer import Work
from nxtrain.metrics.work_meter import KINDS, WorkMeter

EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=30)


@given(EVENTS)
def test_kinds_add_up_to_the_time_between_records(events: list[tuple[str, int, int, bool]]) -> None:
    """Each event enters a kind of work, with time of its own and time of waiting; after some a record is due."""
    now = waited = 0
    meter = WorkMeter(lambda: float(waited), clock=lambda: float(now))
    meter.begin(0)
    expected = dict.fromkeys((*(f"{kind}_s" for kind in KINDS), "waiting_s"), 0.0)
    for step, (work, own_s, waiting_s, is_due) in enumerate(events):
        meter.enter(step, cast("Work", work))
        now += own_s + waiting_s
        waited += waiting_s
        expected[f"{work}_s"] += own_s
        expected["waiting_s"] += waiting_s
        if is_due:
            assert meter.measure(step) == expected
            expected = dict.fromkeys(expected, 0.0)
    assert meter.measure(len(events)) == expected


def test_time_before_the_training_does_not_count() -> None:
    now = 0.0
    meter = WorkMeter(clock=lambda: now)
    now = 100.0
    meter.begin(0)
    now = 101.0
    assert sum(meter.measure(1).values()) == pytest.approx(1.0)


def test_memory_is_recorded_where_it_is_known() -> None:
    assert "peak_memory_bytes" not in WorkMeter().measure(1)
    assert WorkMeter(peak_memory_bytes=lambda: 7).measure(1)["peak_memory_bytes"] == 7
