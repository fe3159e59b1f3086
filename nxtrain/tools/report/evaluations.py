"""Results of `nxtrain eval` over the tokens of training: a chart for each task, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from nxtrain.common.io import jsonl
from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.tools.report.chart import Chart, Curve, draw
from nxtrain.tools.report.columns import MOST
from nxtrain.tools.report.figures import NUM_COLORS
from nxtrain.tools.report.run import RecordedRun, shortened

Point = tuple[float, float, float]
"""Tokens of training, value, and standard error, which is 0 if unknown."""

MOST_TASKS = 40
"""Most tasks that the page shows, those that were measured first."""


def evaluations(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Charts of the tasks that the runs have results of."""
    tasks_of_runs = [dict(_tasks(run)) for run in runs]
    names = list(dict.fromkeys(chain.from_iterable(tasks_of_runs)))
    charts = []
    for number, (task, metric) in enumerate(names[:MOST_TASKS]):
        curves: list[Curve] = []
        for number_of_run, (run, tasks) in enumerate(zip(runs, tasks_of_runs, strict=True)):
            label = run.name if len(runs) > 1 else metric
            points = tasks.get((task, metric), [])
            tokens, values, errors = np.array(points, np.float64).reshape(-1, 3).T
            color = number_of_run % NUM_COLORS
            curves.append(Curve(label, color, tokens, values))
            if errors.any():
                curves.append(Curve(f"{label} + error", color, tokens, values + errors, "dashed"))
                curves.append(Curve(f"{label} - error", color, tokens, values - errors, "dashed"))
        title = shortened(f"{task}: {metric}", 60)
        charts.append(draw(f"evaluation-{number}", title, "over tokens", curves, note=_NOTE))
    return [chart for chart in charts if chart is not None]


_NOTE = "Dashed lines are one standard error above and below."


def _tasks(run: RecordedRun) -> Iterator[tuple[tuple[str, str], list[Point]]]:
    """Name and metric of each task, and its points by rising tokens; each task has those of its newest requests."""
    try:
        lines = [line for line in jsonl.read(run.folder / EVALUATIONS_FILE) if _is_result(line)]
    except OSError:  # the page shows what can be read
        return
    newest = {line["task"]: line["question"] for line in lines}
    for task, question in newest.items():
        of_task = [line for line in lines if (line["task"], line["question"]) == (task, question)]
        metric = next(iter(of_task[-1]["metrics"]))
        points = {}
        for line in of_task:
            tokens, value = float(line["tokens"]), _number(line["metrics"].get(metric))
            if value is not None:
                points[tokens] = (tokens, value, _number(line["metrics"].get("stderr")) or 0.0)
        yield (task, metric), sorted(points.values())


def _is_result(line: Mapping[str, Any]) -> bool:
    """True if a line is one that `nxtrain eval` writes."""
    named = isinstance(line.get("task"), str) and isinstance(line.get("question"), str)
    metrics = line.get("metrics")
    return named and _number(line.get("tokens")) is not None and isinstance(metrics, dict) and bool(metrics)


def _number(value: object) -> float | None:
    """A finite number that can be drawn; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or abs(value) >= MOST:
        return None
    return float(value)
