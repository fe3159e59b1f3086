"""Sinks for step records: the metrics file, TensorBoard event files, Prometheus' file, and the progress display.

A failed sink is retried while training continues. A run that resumes at step k repeats the steps after k. Each sink
therefore first drops the old records of these steps, so that each step has one record.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxtrain.common.errors import BackendError
from nxtrain.common.io import jsonl
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.process.console import standard_error
from nxtrain.common.run_folder import (
    EXPERTS_FILE,
    LOGS_DIR,
    METRICS_FILE,
    MLFLOW_DIR,
    PROMETHEUS_FILE,
    TENSORBOARD_DIR,
    WANDB_DIR,
)
from nxtrain.config.load import values
from nxtrain.metrics.meters import Clock
from nxtrain.metrics.progress import open_progress
from nxtrain.metrics.routers import EXPERT_SLOTS

if TYPE_CHECKING:
    from nxtrain.config.schema import RunConfig

KEPT = 10_000
"""Maximum number of records that wait in memory for a failed sink; the oldest are dropped first."""

REST = 20.0
"""Pause before a retry, as a multiple of the failed attempt's duration: failing writes take at most 1/20 of the
time."""


class Sink(Protocol):
    """Receiver of step records, such as a file."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record. `step` is among its keys, None means unknown, and values need not be numbers."""
        ...

    def close(self) -> None:
        """Make all records durable, and release files and the screen."""
        ...


class RetryingSink:
    """Wrapper of a sink, which reopens the sink after a failure and writes the missed records.

    A message reports the beginning and the end of a failure, and no step in between.
    """

    def __init__(
        self, name: str, open_after: Callable[[int], Sink], resume_step: int, clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._open_after = open_after
        self._last = resume_step
        self._clock = clock
        self._sink: Sink | None = None
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._num_lost = 0
        self._in_trouble = False
        self._again_s = clock()
        self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue one record, and write it now or later."""
        if len(self._waiting) == KEPT:
            self._waiting.popleft()
            self._num_lost += 1
        self._waiting.append(record)
        if self._clock() >= self._again_s:
            self._write()

    def close(self) -> None:
        """Try once more to write the queued records, and close the sink."""
        if self._waiting:
            self._write()
        missing = len(self._waiting) + self._num_lost
        if missing:
            standard_error().print(f"warning: {missing} records are missing in {self.name}, which could not be written")
        self._close_sink()

    def _write(self) -> None:
        began_s = self._clock()
        try:
            if self._sink is None:
                self._sink = self._open_after(self._last)
            while self._waiting:
                self._sink.log(self._waiting[0])
                self._last = int(self._waiting.popleft()["step"])
        except OSError as error:
            self._close_sink()
            now_s = self._clock()
            self._again_s = now_s + REST * (now_s - began_s)
            if not self._in_trouble:
                why = error.strerror or str(error)
                standard_error().print(
                    f"warning: {self.name} cannot be written: {why}; training goes on, and its records wait in memory"
                )
            self._in_trouble = True
        else:
            if self._in_trouble:
                standard_error().print(f"{self.name} is written again, up to step {self._last}")
            self._in_trouble = False

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(OSError):  # its buffered records are written again, or are reported as missing
                sink.close()


def refuse_deleted(descriptor: int, path: object) -> None:
    """Raise a FileNotFoundError for an open file that was deleted."""
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(f"{path} was deleted")


class PrometheusSink:
    """File in Prometheus' text format, with a gauge for each number of the newest record.

    The textfile collector of Prometheus' node exporter reads the file. The file is replaced atomically.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run

    def log(self, record: Mapping[str, Any]) -> None:
        """Replace the file by one with this record."""
        replace_text(self._path, text_of(record, self._run), durable=False)

    def close(self) -> None:
        """Do nothing, since the last record stays in the file."""


def text_of(record: Mapping[str, Any], run: str) -> str:
    """Format a record in Prometheus' text format; values that are not numbers are left out.

    A key with other characters than a name may have is a label, too: two keys may have one name.
    """
    samples: dict[str, list[str]] = {}
    for key, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            name = "nxtrain_" + re.sub("[^a-zA-Z0-9_]", "_", key)
            labels = f'run="{_escaped(run)}"'
            if name != f"nxtrain_{key}":
                labels += f',key="{_escaped(key)}"'
            number = repr(float(value))
            number = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(number, number)
            samples.setdefault(name, []).append(f"{name}{{{labels}}} {number}")
    lines = []
    for name, of_name in samples.items():
        lines += [f"# TYPE {name} gauge", *of_name]
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    """Value of a label in Prometheus' text format."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


PROGRESS = "the progress display"


class JsonlSink:
    """Sink that writes one JSON object per line. Opening removes incomplete lines, and lines after the resume step."""

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            jsonl.truncate_after(path, "step", resume_step)
        self._path = path
        self._file = jsonl.open_to_append(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record in one write. JSON knows no NaN: a value that is not finite becomes null."""
        refuse_deleted(self._file.fileno(), self._path)
        finite = {key: value for key, value in record.items() if key != EXPERT_SLOTS}
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                finite[key] = None
        jsonl.write_line(self._file, json.dumps(finite, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SlotsSink(JsonlSink):
    """File with the slots of each expert, separate from the other metrics, which are read often."""

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(exist_ok=True)
        super().__init__(path, resume_step)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the expert slots of a record, for each block."""
        super().log({"step": record["step"], "slots": record[EXPERT_SLOTS]})


def open_sinks(config: RunConfig, resume_step: int, leader: bool, *, has_experts: bool = False) -> list[RetryingSink]:
    """Open the configured sinks of rank 0; a sink that cannot write does not end the run."""
    if not leader:
        return []
    metrics, run_dir = config.metrics, config.run.dir
    event_sink = None
    if metrics.tensorboard:
        try:  # before a file is open
            from nxtrain.metrics.tensorboard import TensorBoardSink  # slow imports, which only the leader needs
        except ImportError as error:
            way_out = "pip install 'tensorboard>=2.18,<3', or metrics.tensorboard=false"
            raise BackendError(f"tensorboard cannot be imported: {error}; {way_out}") from error
        event_sink = TensorBoardSink
    trackers = _trackers(config)
    sinks = [RetryingSink(METRICS_FILE, partial(JsonlSink, run_dir / METRICS_FILE), resume_step)]
    if has_experts:
        name = f"{LOGS_DIR}/{EXPERTS_FILE}"
        sinks.append(RetryingSink(name, partial(SlotsSink, run_dir / LOGS_DIR / EXPERTS_FILE), resume_step))
    if event_sink is not None:
        open_events = partial(event_sink, run_dir / TENSORBOARD_DIR)
        sinks.append(RetryingSink(TENSORBOARD_DIR, open_events, resume_step))
    if metrics.prometheus:
        path, name = run_dir / PROMETHEUS_FILE, config.run.name
        sinks.append(RetryingSink(PROMETHEUS_FILE, lambda resumed: PrometheusSink(path, name), resume_step))
    sinks += [RetryingSink(name, opened, resume_step) for name, opened in trackers.items()]
    if metrics.progress:
        opened = partial(open_progress, config.train.steps, sizes=config.train.batch_sizes())
        sinks.append(RetryingSink(PROGRESS, opened, resume_step))
    return sinks


def _trackers(config: RunConfig) -> dict[str, Callable[[int], Sink]]:
    """Functions that open the configured experiment trackers, whose packages are installed."""
    run_dir, name = config.run.dir, config.run.name
    mode, uri = config.metrics.wandb, config.metrics.mlflow
    trackers: dict[str, Callable[[int], Sink]] = {}
    if mode == "off" and not uri:
        return trackers
    from nxtrain.metrics.trackers import MlflowSink, WandbSink, require

    shown = values(config)
    if mode != "off":
        require("wandb", "wandb", "metrics.wandb")
        folder, records = run_dir / WANDB_DIR, run_dir / METRICS_FILE
        trackers["Weights & Biases"] = lambda resumed: WandbSink(folder, name, shown, mode, records, resumed)
    if uri:
        require("mlflow", "mlflow", "metrics.mlflow")
        trackers["MLflow"] = lambda resumed: MlflowSink(run_dir / MLFLOW_DIR, name, shown, uri)
    return trackers
