"""Times by kind of work and section, against a brute-force reading of drawn histories on clocks that the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.metrics.run_observer import Section, Work
from nxtrain.metrics.work_meter import KINDS, SECTIONS, EventTimeline, HostTimeline, WorkMeter

Event = tuple[str, int, int, bool]
"""Kind or section, its own time, the time of waiting in it, and True if a record is due after it."""

EVENTS: st.SearchStrategy[list[Event]] = st.lists(
    st.tuples(st.sampled_from((*KINDS, *SECTIONS)), st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=40
)


def expected_of(events: Sequence[Event], *, all_sections: set[str]) -> dict[str, float]:
    """Brute force: every event counts for its key, sections for the whole step too."""
    result = dict.fromkeys((*(f"{kind}_s" for kind in KINDS), "waiting_s"), 0.0)
    result |= dict.fromkeys((f"{name}_s" for name in all_sections), 0.0)
    for kind, own_s, waiting_s, _ in events:
        result[f"{kind}_s"] += own_s
        result["waiting_s"] += waiting_s
        result["training_s"] += own_s if kind in SECTIONS else 0
    return result


def enter(meter: WorkMeter, step: int, kind: str) -> None:
    if kind in SECTIONS:
        meter.section(cast("Section", kind))
    else:
        meter.enter(step, cast("Work", kind))


@given(EVENTS)
def test_kinds_add_up_to_the_time_between_records(events: list[Event]) -> None:
    now = waited = 0
    meter = WorkMeter(HostTimeline(lambda: float(waited), clock=lambda: float(now)))
    meter.begin(0)
    since: list[Event] = []
    for step, event in enumerate([*events, ("data", 0, 0, True)]):
        kind, own_s, waiting_s, is_due = event
        enter(meter, step, kind)
        now += own_s + waiting_s
        waited += waiting_s
        since.append(event)
        if is_due:
            seen = {kind for kind, *_ in events[: step + 1]} & set(SECTIONS)
            result = meter.measure(step)
            assert result == expected_of(since, all_sections=seen)
            assert sum(result[f"{kind}_s"] for kind in (*KINDS, "waiting")) == sum(
                own + wait for _, own, wait, _ in since
            )
            since = []


class Queue:
    """A device that works off its queue while the host runs ahead, with events that know when they were reached."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.reached_s = 0.0

    def work(self, seconds: float) -> None:
        """Queue work of the device; the host spends nothing."""
        self.device_s = max(self.device_s, self.host_s) + seconds

    def record(self) -> Any:
        queue = self

        class At:
            at_s = max(queue.device_s, queue.host_s)

            def query(self) -> bool:
                return queue.host_s >= self.at_s

            def synchronize(self) -> None:
                queue.host_s = max(queue.host_s, self.at_s)

            def elapsed_time(self, end_event: Any) -> float:
                assert self.query()
                assert end_event.query(), "CUDA raises for events that are not reached"
                return 1e3 * float(end_event.at_s - self.at_s)

        return At()


@given(EVENTS, st.lists(st.integers(0, 60), min_size=41, max_size=41))
def test_events_divide_the_time_of_a_device_that_lags_behind_its_host(events: list[Event], host: list[int]) -> None:
    """Brute force: the device is in a kind from the moment it reaches its event until it reaches the next."""
    queue = Queue()
    timeline = EventTimeline(queue.record)
    meter = WorkMeter(timeline)
    meter.begin(0)
    expected: dict[str, float] = {}

    def mark(kind: str, seconds: float, host_s: float) -> None:
        before = max(queue.device_s, queue.host_s)
        queue.work(seconds)
        queue.host_s += host_s
        key = "waiting_s" if kind == "waiting" else f"{kind}_s"
        expected[key] = expected.get(key, 0.0) + max(queue.device_s, queue.host_s) - before

    for step, ((kind, own_s, waiting_s, _), host_s) in enumerate(zip(events, host, strict=False)):
        enter(meter, step, kind)
        mark(kind, own_s, host_s)
        timeline.wait(True)
        mark("waiting", waiting_s, 0)
        timeline.wait(False)
        mark(kind, own_s, 0)
    began, actual = 0.0, dict(meter.measure(len(events)))
    expected["training_s"] = expected.get("training_s", 0.0) + sum(expected.get(f"{name}_s", 0.0) for name in SECTIONS)
    assert {key: value for key, value in actual.items() if value} == pytest.approx(
        {key: value for key, value in expected.items() if value}
    )
    whole = sum(actual[f"{kind}_s"] for kind in (*KINDS, "waiting"))
    assert whole == pytest.approx(max(queue.device_s, queue.host_s) - began)


def test_time_before_the_training_does_not_count() -> None:
    now = 0.0
    meter = WorkMeter(HostTimeline(clock=lambda: now))
    now = 100.0
    meter.begin(0)
    now = 101.0
    assert sum(meter.measure(1).values()) == pytest.approx(1.0)


def test_memory_is_recorded_where_it_is_known() -> None:
    assert "peak_memory_bytes" not in WorkMeter().measure(1)
    assert WorkMeter(peak_memory_bytes=lambda: 7).measure(1)["peak_memory_bytes"] == 7
