"""Spikes are told, growth is an alarm, and both come at the same records after a checkpoint."""

from __future__ import annotations

import json
import math

import pytest

from nxtrain.metrics import stability
from nxtrain.metrics.stability import Stability


def norms(steps: int, spike_at: int = 0, length: int = 0, factor: float = 10.0) -> list[float]:
    """Norms that fall from 4 to 1 and tremble; some are larger."""
    plain = [1.0 + 3.0 * math.exp(-step / 10) + 0.1 * math.sin(step) for step in range(1, steps + 1)]
    return [x * factor if spike_at <= i < spike_at + length else x for i, x in enumerate(plain, 1)]


def kinds(values: list[float], watch_of_run: Stability | None = None) -> dict[int, str]:
    """Records with an alarm, by number."""
    watch = watch_of_run or Stability()
    result = {i: watch.see(2.0, norm)[0] for i, norm in enumerate(values, 1)}
    return {i: kind for i, kind in result.items() if kind}


def test_a_run_that_learns_is_quiet() -> None:
    assert kinds(norms(300)) == {}


@pytest.mark.parametrize("factor", [13.0, 1e6])
def test_a_spike_of_one_step_is_told_and_is_no_divergence(factor: float) -> None:
    assert kinds(norms(200, spike_at=100, length=1, factor=factor)) == {100: "spike"}


def test_thirty_steps_of_ten_times_the_norm_are_an_alarm_before_they_end() -> None:
    result = kinds(norms(200, spike_at=100, length=30, factor=13.0))
    (alarm,) = [i for i, kind in result.items() if kind == "diverging"]
    assert 100 + stability.SUSTAINED <= alarm < 130
    assert min(result) == 100


def test_slow_growth_to_three_times_the_lowest_is_an_alarm_once() -> None:
    values = norms(100) + [1.0 * 1.03**i for i in range(70)]
    (alarm,) = kinds(values)
    crossed = 100 + math.ceil(math.log(3 * 0.9) / math.log(1.03))
    assert crossed <= alarm <= crossed + stability.SMOOTHED + stability.SUSTAINED
    assert set(kinds(values).values()) == {"diverging"}


def test_a_norm_near_the_threshold_is_an_alarm_once() -> None:
    """For hundreds of steps the norm goes from below three times its lowest to above it, and back."""
    values = norms(100) + [2.8 + 0.8 * math.sin(step / 6) for step in range(400)]
    assert list(kinds(values).values()) == ["diverging"]


def test_a_norm_that_grows_on_or_grows_after_a_recovery_is_an_alarm_again() -> None:
    def alarms_of(*levels: float) -> list[str]:
        return list(kinds(norms(100) + [level for level in levels for _ in range(40)]).values())

    assert alarms_of(4.0, 8.0, 4.0) == ["diverging"]
    assert alarms_of(4.0, 2.0, 4.0) == ["diverging"]
    assert alarms_of(4.0, 1.0, 4.0) == ["diverging"] * 2
    assert alarms_of(4.0, 9.0, 18.0, 36.0) == ["diverging"] * 2
    assert alarms_of(*(1.2**power for power in range(30))) == ["diverging"] * 4


def test_a_loss_that_jumps_is_told_with_its_numbers() -> None:
    watch = Stability()
    for _ in range(stability.FEWEST):
        assert watch.see(2.0, 1.0) == ("", "")
    assert watch.see(21.0, 1.0) == ("spike", "loss 21 is 10 times the median of 8 steps before it")


def test_the_first_records_are_no_spikes() -> None:
    assert kinds([1.0] * (stability.FEWEST - 1) + [1e3]) == {}
    assert kinds([1.0] * stability.FEWEST + [1e3]) == {stability.FEWEST + 1: "spike"}


def test_numbers_that_are_not_finite_leave_no_trace() -> None:
    watch, clean = Stability(), Stability()
    for norm in norms(50):
        assert watch.see(2.0, norm) == clean.see(2.0, norm)
        assert watch.see(math.nan, math.inf) == ("", "")
    assert watch.state() == clean.state()


@pytest.mark.parametrize("saved", [0, 3, 70, 104, 112, 150, 210])
def test_alarms_after_a_checkpoint_are_those_of_the_straight_run(saved: int) -> None:
    values = norms(200, spike_at=100, length=30, factor=13.0)
    values += [2.8 + 0.8 * math.sin(step / 6) for step in range(200)]
    before, after = Stability(), Stability()
    kinds(values[:saved], before)
    after.restore(json.loads(json.dumps(before.state(), allow_nan=False)))
    resumed = {saved + i: kind for i, kind in kinds(values[saved:], after).items()}
    assert resumed == {i: kind for i, kind in kinds(values).items() if i > saved}
    assert dict(kinds(values[saved:]).items()) != resumed or saved == 0
