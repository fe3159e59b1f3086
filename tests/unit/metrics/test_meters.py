"""Speed and the record of a step, on a clock that the test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nxtrain.metrics.meters import StepRecord, Throughput, ThroughputMeter

if TYPE_CHECKING:
    from tests.unit.metrics.conftest import FakeClock


def test_throughput_is_that_of_the_window_and_tokens_are_those_of_the_run(clock: FakeClock) -> None:
    meter = ThroughputMeter(lambda step: 6_000 // step, peak_flops=1_200_000.0, tokens=500, clock=clock)
    for _ in range(4):
        meter.add_step(1, 50)
    clock.now += 8.0
    assert meter.read() == Throughput(tokens=700, tokens_per_s=25.0, step_time_s=2.0, mfu=0.125)
    meter.add_step(2, 30)
    clock.now += 0.5
    assert meter.read() == Throughput(tokens=730, tokens_per_s=60.0, step_time_s=0.5, mfu=0.15)


def test_pauses_are_not_training_time_even_when_they_fail(clock: FakeClock) -> None:
    meter = ThroughputMeter(lambda step: 1, peak_flops=None, clock=clock)
    meter.add_step(1, 10)
    clock.now += 2.0
    with pytest.raises(RuntimeError), meter.paused():
        clock.now += 100.0
        raise RuntimeError
    assert meter.read() == Throughput(tokens=10, tokens_per_s=5.0, step_time_s=2.0, mfu=None)


def test_line_has_the_contract_keys_and_null_for_an_unknown_mfu() -> None:
    record = StepRecord(7, 2.5, 4000, 1.25, 30.0, 0.5, 1e-3, Throughput(4096, 512.0, 0.125, None))
    assert record.line() == {
        "step": 7,
        "loss": 2.5,
        "targets": 4000,
        "grad_norm": 1.25,
        "param_norm": 30.0,
        "lost_update_frac": 0.5,
        "lr": 1e-3,
        "tokens": 4096,
        "tokens_per_s": 512.0,
        "step_time_s": 0.125,
        "mfu": None,
    }


def test_line_has_the_held_out_loss_only_when_it_was_measured() -> None:
    speed = Throughput(1, 1.0, 1.0, None)
    assert "val_loss" not in StepRecord(1, 2.0, 1, 1.0, 1.0, 0.0, 0.0, speed).line()
    assert StepRecord(1, 2.0, 1, 1.0, 1.0, 0.0, 0.0, speed, val_loss=0.0).line()["val_loss"] == 0.0
