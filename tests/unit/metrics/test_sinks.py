"""The metrics file and the event files survive crashes and resumes with each step in them once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxtrain.config.schema import MetricsConfig
from nxtrain.metrics.events import TensorBoardSink
from nxtrain.metrics.progress import ProgressBar, ProgressLines
from nxtrain.metrics.sinks import JsonlSink, open_sinks


def write_steps(path: Path, first: int, last: int, *, resume_step: int, loss: float = 1.0) -> None:
    sink = JsonlSink(path, resume_step=resume_step)
    for step in range(first, last + 1):
        sink.log({"step": step, "loss": loss})
    sink.close()


def steps_and_losses(path: Path) -> list[tuple[int, float]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [(line["step"], line["loss"]) for line in map(json.loads, text.splitlines())]


def test_values_come_back_bit_for_bit_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl", resume_step=0)
    sink.log({"step": 1, "loss": 0.1 + 0.2, "mfu": None, "grad_norm": math.inf, "lr": 5e-324, "param_norm": math.nan})
    line = (tmp_path / "m.jsonl").read_text()
    sink.close()
    expected = {"step": 1, "loss": 0.1 + 0.2, "mfu": None, "grad_norm": None, "lr": 5e-324, "param_norm": None}
    assert json.loads(line) == expected


def test_resume_drops_the_steps_that_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 7, resume_step=0)
    write_steps(path, 5, 6, resume_step=4, loss=2.0)
    assert steps_and_losses(path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_a_start_from_scratch_in_an_old_folder_begins_an_empty_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 3, resume_step=0)
    write_steps(path, 1, 1, resume_step=0, loss=9.0)
    assert steps_and_losses(path) == [(1, 9.0)]


@pytest.mark.parametrize("kept_bytes", range(1, 25))
def test_a_line_torn_anywhere_is_repaired(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 2, resume_step=0)
    first, second = path.read_bytes().splitlines(keepends=True)
    assert len(second) == 25
    path.write_bytes(first + second[:kept_bytes])
    write_steps(path, 3, 3, resume_step=2)
    complete = [(2, 1.0)] if kept_bytes == 24 else []
    assert steps_and_losses(path) == [(1, 1.0), *complete, (3, 1.0)]


def test_bytes_that_are_no_text_are_repaired(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 1, resume_step=0)
    with path.open("ab") as file:
        file.write(b"\xff\x00\x00")
    write_steps(path, 2, 2, resume_step=1)
    assert steps_and_losses(path) == [(1, 1.0), (2, 1.0)]


def test_repair_leaves_no_other_file(tmp_path: Path) -> None:
    write_steps(tmp_path / "m.jsonl", 1, 3, resume_step=0)
    write_steps(tmp_path / "m.jsonl", 2, 3, resume_step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for first, last, resume_step, loss in ((1, 6, 0, 1.5), (4, 5, 3, 0.25)):
        sink = TensorBoardSink(tmp_path, resume_step=resume_step)
        for step in range(first, last + 1):
            sink.log({"step": step, "loss": loss, "mfu": None})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read == [(1, 1.5), (2, 1.5), (3, 1.5), (4, 0.25), (5, 0.25)]


def test_tensorboard_shows_a_step_before_the_run_ends(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=0)
    for step in range(1, 5):
        sink.log({"step": step, "loss": 0.5})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    sink.close()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_only_the_leader_writes(tmp_path: Path) -> None:
    config = MetricsConfig(tensorboard=True, progress=True)
    assert open_sinks(config, tmp_path, 10, 0, leader=False) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("progress", [False, True])
def test_the_configuration_chooses_the_sinks(tmp_path: Path, tensorboard: bool, progress: bool) -> None:
    sinks = open_sinks(MetricsConfig(tensorboard=tensorboard, progress=progress), tmp_path, 10, 0, leader=True)
    for sink in sinks:
        sink.close()
    assert (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "tensorboard").exists() == tensorboard
    assert any(isinstance(sink, ProgressBar | ProgressLines) for sink in sinks) == progress
