"""Cost of watching a run: processor time of a record through all that reads, counts and writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.run_folder import LOGS_DIR, METRICS_FILE
from nxtrain.config.schema import RunConfig
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.run_observer import Observers, Section
from nxtrain.metrics.sinks import open_sinks
from nxtrain.metrics.work_meter import WorkMeter
from nxtrain.tools.report.watch import Followed
from tests.support.processes import patient_s
from tests.support.run_folders import record, write_run

STEP_S = 0.05
"""A step of `configs/tiny_cpu.toml`, the smallest run that is shipped, takes longer on a core of a cloud machine."""

STEPS, ROUNDS = 500, 5
SECTIONS: tuple[Section, ...] = ("forward", "backward", "reduce", "optimizer")


def cost_s(work: Callable[[int], object], number: int) -> float:
    """Processor time of one call, the least of some rounds: whatever else runs can only add to it."""
    rounds = []
    for turn in range(ROUNDS):
        began = time.process_time()
        for step in range(turn * number + 1, (turn + 1) * number + 1):
            work(step)
        rounds.append((time.process_time() - began) / number)
    return min(rounds)


@pytest.mark.alone
def test_watching_every_step_takes_less_than_a_hundredth_of_it(tmp_path: Path) -> None:
    """Sections of each step; goodput, JSONL, TensorBoard and the status line as often as they are by default."""
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}, "train": {"steps": STEPS * ROUNDS}})
    assert config.metrics.tensorboard
    assert config.metrics.progress
    goodput, work = GoodputMeter(tmp_path / LOGS_DIR, lambda line: None), WorkMeter()
    observers = Observers(goodput, work)
    sinks = open_sinks(config, 0, leader=True)
    observers.begin(0)

    def step(number: int) -> None:
        for kind in ("data", "training"):
            observers.enter(number, kind)
        for section in SECTIONS:
            observers.section(section)
        if number % config.metrics.log_every:
            return
        observers.enter(number, "log")
        measured: dict[str, Any] = {**record(number), **observers.measure(number)}
        for sink in sinks:
            sink.log(measured)

    found_s = cost_s(step, STEPS)
    for sink in sinks:
        sink.close()
    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert len(lines) == STEPS * ROUNDS / config.metrics.log_every
    assert found_s < patient_s(0.01 * STEP_S), f"{1e6 * found_s:.0f} us for each step"


@pytest.mark.alone
def test_a_look_from_another_terminal_takes_less_than_a_hundredth_of_the_second_between_two(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2000)
    run = Followed(folder)
    run.line()
    assert cost_s(lambda _: run.line(), 50) < patient_s(0.01)
