"""Sinks that send step records to Weights & Biases and to MLflow, through their own packages.

Both trackers have one tracker run for each run folder, with any number of starts. An id in the folder identifies the
tracker run. A start that repeats steps logs them again, with the step number as a value. Weights & Biases writes in a
separate process, which loses records when the machine or the container is killed. The next start sends lost records
again, from the metrics file.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from nxtrain.common.errors import BackendError
from nxtrain.common.io import jsonl
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.io.regular import read_text

PROJECT = "nxtrain"
"""Name of the project (Weights & Biases) or experiment (MLflow) of all runs."""

_LONGEST_NAME = 240
"""Characters of a metric name. MLflow takes 250, and a number may follow."""

IDENTITY, OPEN = "id.txt", "open.txt"


class WandbSink:
    """Sink that logs to a Weights & Biases run. In mode `offline`, `wandb sync` uploads its files later."""

    def __init__(
        self,
        folder: Path,
        name: str,
        config: Mapping[str, Any],
        mode: Literal["offline", "online"],
        records: Path,
        resume_step: int,
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._open = folder / OPEN
        # Last step that Weights & Biases certainly has: the resume step of the first start without an end.
        sent = resume_step
        if self._open.exists():
            text = read_text(self._open).strip()
            sent = min(int(text), resume_step) if text.isdecimal() else 0
        with _as_os_error("wandb"):
            self._run = wandb.init(
                project=PROJECT,
                name=name,
                id=identity(folder, lambda: uuid.uuid4().hex[:8]),
                dir=str(folder),
                config=dict(config),
                mode=mode,
                resume="allow",
                # Nothing next to the records: no capture of the terminal, no statistics of the machine, no code.
                settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True),
            )
            self._run.define_metric("*", step_metric="step")
        replace_text(self._open, f"{sent}\n", durable=True)
        for record in jsonl.each(records):
            if sent < int(record.get("step", 0)) <= resume_step:
                self.log(record)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record."""
        with _as_os_error("wandb"):
            self._run.log(numbers_of(record))

    def close(self) -> None:
        """Finish the tracker run, after its process has written all records."""
        with _as_os_error("wandb"):
            self._run.finish()
        self._open.unlink(missing_ok=True)


class MlflowSink:
    """Sink that logs to an MLflow run in a tracking store; the configuration is logged once, as parameters."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], uri: str) -> None:
        from mlflow.entities import Param
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
        from mlflow.tracking import MlflowClient

        # `RetryingSink` tries again later. MLflow's own 7 attempts would hold training for minutes.
        MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 1
        MLFLOW_HTTP_REQUEST_TIMEOUT.default = 30
        folder.mkdir(parents=True, exist_ok=True)
        self._names: dict[str, str] = {}
        with _as_os_error("mlflow"):
            self._client = MlflowClient(tracking_uri=uri)

            def begun() -> str:
                experiment = self._client.get_experiment_by_name(PROJECT)
                experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
                run: str = self._client.create_run(experiment_id, run_name=name).info.run_id
                params = [Param(key, str(value)[:500]) for key, value in config.items()]
                for at in range(0, len(params), 100):  # MLflow takes no more at once
                    self._client.log_batch(run, params=params[at : at + 100])
                return run

            self._id = identity(folder, begun)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record."""
        from mlflow.entities import Metric

        step, now_ms = int(record["step"]), int(1e3 * time.time())
        metrics = [Metric(self._name(key), float(value), now_ms, step) for key, value in numbers_of(record).items()]
        with _as_os_error("mlflow"):
            self._client.log_batch(self._id, metrics=metrics)

    def _name(self, key: str) -> str:
        """Name of a metric in MLflow, different for different keys."""
        if key not in self._names:
            name, taken = metric_name(key), set(self._names.values())
            number = 2
            while name in taken:
                name, number = f"{metric_name(key)} {number}", number + 1
            self._names[key] = name
        return self._names[key]

    def close(self) -> None:
        """Mark the tracker run as ended."""
        with _as_os_error("mlflow"):
            self._client.set_terminated(self._id)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a record, by key."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if not isinstance(value, bool) and math.isfinite(value)}


def metric_name(key: str) -> str:
    """Metric name that MLflow accepts: letters, digits and some signs, and a path without empty or relative parts.

    A key may have the path or the address of a corpus. MLflow refuses a whole record for one name.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    return "/".join(part for part in parts if part not in {"", ".", ".."})[:_LONGEST_NAME]


def identity(folder: Path, begin: Callable[[], str]) -> str:
    """Id of the tracker run recorded in a folder; without one, the id of a new run that `begin` creates."""
    file = folder / IDENTITY
    if file.exists():
        return read_text(file).strip()
    begun = begin()
    replace_text(file, f"{begun}\n", durable=True)
    return begun


def require(package: str, extra: str, key: str) -> None:
    """Import a tracker's package, before any sink is opened."""
    try:
        __import__(package)
    except ImportError as error:
        raise BackendError(
            f"{package} cannot be imported: {error}; pip install 'nxtrain[{extra}]', or leave {key} out"
        ) from error


@contextmanager
def _as_os_error(package: str) -> Iterator[None]:
    """Context that turns any failure of a tracker into an OSError, which does not end the run."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{package}: {type(error).__name__}: {error}") from error
