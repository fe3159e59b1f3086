"""Record of the evaluations of a run: a line for each task of each checkpoint, written as soon as a task is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxtrain.common.io import jsonl
from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.tools.eval.task import Metrics, is_number
from nxtrain.tools.eval.trained import Trained


class Record:
    """Results of a run folder; results of other models stay in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / EVALUATIONS_FILE if folder else None
        self._done: dict[tuple[object, ...], Metrics] = {}
        if self._file:
            for line in jsonl.read(self._file):
                if _is_whole(line):
                    self._done[line["weights"], line["task"], line["question"]] = line["metrics"]

    def find(self, model: Trained, task: str, question: str) -> Metrics | None:
        """Result of a task for requests of an identity, which depends on seed and limit; None if it is not done."""
        return self._done.get((model.identity, task, question))

    def add(self, model: Trained, task: str, question: str, metrics: Metrics) -> None:
        """Append a result."""
        line = {"step": model.step, "tokens": model.tokens, "weights": model.identity}
        line |= {"task": task, "question": question, "metrics": dict(metrics)}
        if self._file:
            jsonl.append(self._file, json.dumps(line, allow_nan=False))
        self._done[model.identity, task, question] = metrics


def _is_whole(line: Mapping[str, Any]) -> bool:
    """True if a line is a valid record of this file, with metrics as `Metrics` describes them."""
    metrics = line.get("metrics")
    if not isinstance(metrics, dict) or not metrics.keys() >= {"stderr", "n"} or next(iter(metrics)) in ("stderr", "n"):
        return False
    for name, value in metrics.items():
        if not is_number(value) and (name != "stderr" or value is not None):
            return False
    return all(isinstance(line.get(name), str) for name in ("weights", "task", "question"))
