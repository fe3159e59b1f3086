"""Sinks for the records of steps: the metrics file, event files, the progress display.

A run that resumes at step k repeats the steps after k. Each sink therefore first drops an earlier process's records of
these steps, so that each step has one record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxtrain.common.errors import BackendError
from nxtrain.common.io import jsonl
from nxtrain.common.run_folder import METRICS_FILE, MLFLOW_DIR, PROMETHEUS_FILE, TENSORBOARD_DIR, WANDB_DIR
from nxtrain.config.load import values
from nxtrain.metrics.progress import open_progress
from nxtrain.metrics.prometheus import PrometheusSink
from nxtrain.metrics.retrying_sink import RetryingSink, Sink, refuse_deleted

if TYPE_CHECKING:
    from nxtrain.config.schema import RunConfig

PROGRESS = "the progress display"


class JsonlSink:
    """Sink that writes one JSON object per line; lines after the resume step and torn lines are removed first."""

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            jsonl.keep_up_to(path, "step", resume_step)
        self._path = path
        self._file = jsonl.open_to_append(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record in one write. JSON knows no NaN: a value that is not finite becomes null."""
        refuse_deleted(self._file.fileno(), self._path)
        finite = dict(record)
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                finite[key] = None
        jsonl.write_line(self._file, json.dumps(finite, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_sinks(config: RunConfig, resume_step: int, leader: bool) -> list[RetryingSink]:
    """Open the configured sinks of the leader; a sink that cannot write does not end the run."""
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
    if event_sink is not None:
        open_events = partial(event_sink, run_dir / TENSORBOARD_DIR)
        sinks.append(RetryingSink(TENSORBOARD_DIR, open_events, resume_step))
    if metrics.prometheus:
        path, name = run_dir / PROMETHEUS_FILE, config.run.name
        sinks.append(RetryingSink(PROMETHEUS_FILE, lambda resumed: PrometheusSink(path, name), resume_step))
    sinks += [RetryingSink(name, opened, resume_step) for name, opened in trackers.items()]
    if metrics.progress:
        sinks.append(RetryingSink(PROGRESS, partial(open_progress, config.train.steps), resume_step))
    return sinks


def _trackers(config: RunConfig) -> dict[str, Callable[[int], Sink]]:
    """Functions that open the configured trackers, whose packages are installed."""
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
