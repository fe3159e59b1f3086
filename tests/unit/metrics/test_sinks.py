"""The metrics file, the event files and the file for Prometheus, over crashes, resumes and full disks."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxtrain.config.operation_schema import MetricsConfig
from nxtrain.config.schema import IdentityConfig, RunConfig
from nxtrain.metrics import sinks as sinks_module
from nxtrain.metrics.sinks import PROGRESS, JsonlSink, PrometheusSink, RetryingSink, Sink, open_sinks, text_of
from nxtrain.metrics.tensorboard import TensorBoardSink


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


def configured(folder: Path, **metrics: bool) -> RunConfig:
    return RunConfig(run=IdentityConfig(dir=folder), metrics=MetricsConfig().model_copy(update=metrics))


def test_only_the_leader_writes(tmp_path: Path) -> None:
    config = configured(tmp_path, tensorboard=True, progress=True, prometheus=True)
    assert open_sinks(config, 0, leader=False) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("prometheus", [False, True])
def test_the_configuration_chooses_the_sinks(
    tmp_path: Path, tensorboard: bool, progress: bool, prometheus: bool
) -> None:
    config = configured(tmp_path, tensorboard=tensorboard, progress=progress, prometheus=prometheus)
    sinks = open_sinks(config, 0, leader=True)
    for sink in sinks:
        sink.log({"step": 1, "loss": 1.5, "tokens_per_s": 1.0})
        sink.close()
    assert (tmp_path / "prometheus.prom").exists() == prometheus
    assert (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "tensorboard").exists() == tensorboard
    assert (PROGRESS in {sink.name for sink in sinks}) == progress


def test_event_files_keep_their_order_when_the_clock_runs_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads them by name, and takes what comes later for the truth."""
    now = time.time()
    for jump, first, resume_step, loss in ((0.0, 1, 0, 1.5), (-3600.0, 4, 3, 0.25), (86400.0, 5, 4, 0.5)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        sink = TensorBoardSink(tmp_path, resume_step=resume_step)
        for step in range(first, 7):
            sink.log({"step": step, "loss": loss})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.5),
        (2, 1.5),
        (3, 1.5),
        (4, 0.25),
        (5, 0.5),
        (6, 0.5),
    ]


class Disk:
    """A sink on a disk that can be full; half of a record may fit."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_full, self.num_opened = path, False, 0

    def open_after(self, step: int) -> Sink:
        self.num_opened += 1
        sink, disk = JsonlSink(self.path, resume_step=step), self
        write = sink.log

        def log(record: Mapping[str, Any]) -> None:
            if disk.is_full:
                with disk.path.open("a") as file:
                    file.write('{"step": ')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(record)

        sink.log = log  # type: ignore[method-assign]
        return sink


def test_a_full_disk_is_told_once_and_what_waited_is_written_when_there_is_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(tmp_path / "m.jsonl")
    sink = RetryingSink("m.jsonl", disk.open_after, 0, lambda: 0.0)
    for step in range(1, 10):
        disk.is_full = 3 <= step < 7
        sink.log({"step": step, "loss": 1.0})
    sink.close()
    assert [step for step, _ in steps_and_losses(disk.path)] == list(range(1, 10))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: m.jsonl cannot be written: No space left on device; training goes on")
    assert second == "m.jsonl is written again, up to step 7"


def test_tries_cost_a_twentieth_of_the_time_at_most(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "m.jsonl")
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # a try takes one second
        return now[0]

    sink = RetryingSink("m.jsonl", disk.open_after, 0, clock)
    disk.is_full = True
    for step in range(1, 101):
        sink.log({"step": step})
    assert 4 <= disk.num_opened - 1 <= 6


def test_what_never_could_be_written_is_counted_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks_module, "KEPT", 3)
    disk = Disk(tmp_path / "m.jsonl")
    sink = RetryingSink("m.jsonl", disk.open_after, 0)
    disk.is_full = True
    for step in range(1, 6):
        sink.log({"step": step})
    sink.close()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "warning: 5 records are missing in m.jsonl, which could not be written"
    )


LABEL = r'"((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
LINE = re.compile(rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{{run={LABEL}(?:,key={LABEL})?\}} (?P<value>\S+)")
"""A sample of https://prometheus.io/docs/instrumenting/exposition_formats, with one or two labels."""

ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
NUMBERS = st.one_of(st.floats(), st.integers(-(10**12), 10**12))
OTHERS = st.sampled_from([None, "spike: loss", True, (3, 1)])
NAMES = st.text(st.sampled_from('a"\\n\n{}= \xe9'), max_size=9)
KEYS = st.one_of(
    st.text(st.sampled_from("abc_012"), min_size=1, max_size=5), st.text(st.sampled_from('a/-_"\\\n\xe9'), max_size=3)
)


@given(
    st.dictionaries(KEYS, st.one_of(NUMBERS, OTHERS), max_size=6),
    st.text(st.sampled_from('a"\\n\n{}= \xe9'), max_size=9),
)
def test_each_number_is_a_gauge_and_reads_back(record: dict[str, object], run: str) -> None:
    *lines, last = text_of(record, run).split("\n")
    assert not last
    results: dict[str, float] = {}
    names: list[str] = []
    samples = []
    for line in lines:
        if line.startswith("# TYPE "):
            names.append(line.removeprefix("# TYPE ").removesuffix(" gauge"))
            continue
        sample = LINE.fullmatch(line)
        assert sample, line
        assert sample["name"] == names[-1]
        label, key = (
            re.sub(r'\\\\|\\"|\\n', lambda item: ESCAPES[item[0]], text or "") for text in sample.groups()[1:3]
        )
        assert label == run
        assert not key or re.sub("[^a-zA-Z0-9_]", "_", f"nxtrain_{key}") == names[-1]
        results[f"nxtrain_{key}" if key else names[-1]] = float(sample["value"])
        samples.append((names[-1], key))
    assert len({*names}) == len(names), "a name is declared once"
    assert len({*samples}) == len(samples), "each sample has its own name or labels"
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    assert results == pytest.approx(
        {f"nxtrain_{key}": float(value) for key, value in numbers.items()}, nan_ok=True, rel=0
    )


def test_the_file_has_the_newest_record_only(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path / "prometheus.prom", "demo")
    sink.log({"step": 1, "loss": 2.5})
    sink.log({"step": 2, "loss": math.nan, "alarm": "spike"})
    sink.close()
    text = (tmp_path / "prometheus.prom").read_text(encoding="utf-8")
    assert text.splitlines()[1::2] == ['nxtrain_step{run="demo"} 2.0', 'nxtrain_loss{run="demo"} NaN']
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.prom"]
