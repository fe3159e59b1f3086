"""A rank that takes longer than its peers is told once, with the section, and again when that is over."""

from __future__ import annotations

import pytest

from nxtrain.common.distributed.heartbeats import Beat
from nxtrain.train.supervision.stragglers import Stragglers

FAST = {"data": 0.001, "training": 0.010}


def messages(stragglers: Stragglers, rates: list[dict[str, float]], steps: range) -> list[str]:
    """Warnings about ranks with these times per step."""
    lines: list[str] = []
    for step in steps:
        beats = {
            rank: Beat(step + 1, "data", 0.0, counted=step, spent={name: rate * step for name, rate in spent.items()})
            for rank, spent in enumerate(rates)
        }
        lines += stragglers.changes(beats)
    return lines


def test_the_slow_one_of_four_is_named_with_its_section_once() -> None:
    slow = {**FAST, "data": 0.062}
    lines = messages(Stragglers([0] * 4), [FAST, slow, FAST, FAST], range(1, 60))
    assert lines == ["rank 1 is slow: 62 ms per step in data, where the median is 1 ms"]


def test_of_two_the_slower_is_named() -> None:
    (line,) = messages(Stragglers([0, 0]), [{"training": 0.1}, {"training": 0.04}], range(1, 30))
    assert line == "rank 0 is slow: 100 ms per step in training, where the median is 40 ms"


def test_little_differences_are_not_told() -> None:
    assert not messages(Stragglers([0, 0]), [{"training": 0.019}, {"training": 0.010}], range(1, 30)), "9 ms"
    assert not messages(Stragglers([0, 0]), [{"training": 1.4}, {"training": 1.0}], range(1, 30)), "40 %"


def test_stages_are_not_compared_with_each_other() -> None:
    rates = [FAST, FAST, {"training": 0.5}, {"training": 0.5}]
    assert not messages(Stragglers([0, 0, 1, 1]), rates, range(1, 30))
    assert len(messages(Stragglers([0, 0, 0, 0]), rates, range(1, 30))) == 2


def test_recovery_is_told_too() -> None:
    stragglers = Stragglers([0, 0])
    total = [0.0, 0.0]
    lines: list[str] = []
    for step in range(1, 120):
        total = [total[0] + 0.01, total[1] + (0.06 if step < 50 else 0.01)]
        beats = {
            rank: Beat(step + 1, "data", 0.0, counted=step, spent={"data": spent}) for rank, spent in enumerate(total)
        }
        lines += stragglers.changes(beats)
    assert [line.partition(":")[0] for line in lines] == ["rank 1 is slow", "rank 1 is as fast as the others again"]


def test_fewer_than_ten_steps_tell_nothing() -> None:
    assert not messages(Stragglers([0, 0]), [{"data": 1.0}, {"data": 0.01}], range(1, 11))


def test_steps_of_earlier_starts_do_not_dilute_the_first_comparison() -> None:
    stragglers = Stragglers([0, 0])
    assert not list(stragglers.changes({rank: Beat(0, "start", 0.0) for rank in range(2)}))
    assert len(messages(stragglers, [{"data": 0.1}, {"data": 0.01}], range(1000, 1011))) == 1
    assert stragglers.rates[0]["data"] == pytest.approx(0.1)
