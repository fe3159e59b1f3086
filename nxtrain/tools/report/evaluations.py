"""Results of `nxtrain eval` over the tokens of training: a chart for each task, with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from nxtrain.common.io import jsonl
from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.tools.report.chart import Curve, draw
from nxtrain.tools.report.columns import MOST, number_of
from nxtrain.tools.report.figures import NUM_COLORS
from nxtrain.tools.report.run import RecordedRun, shortened

MOST_TASKS = 40  # most tasks that the page shows, those that were measured first


def evaluations(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Charts of the tasks that the runs have results of."""
    tasks_of_runs = [_tasks(run) for run in runs]
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
        note = "Dashed lines are one standard error above and below."
        charts.append(draw(f"evaluation-{number}", title, "over tokens", curves, note=note))
    return [chart for chart in charts if chart is not None]


def _tasks(run: RecordedRun) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """Tokens, value and standard error (0 if unknown) of each task and metric, for the newest requests of the task."""
    try:
        lines = [line for line in jsonl.read(run.folder / EVALUATIONS_FILE) if _is_result(line)]
    except OSError:  # the page shows what can be read
        return {}
    tasks = {}
    newest = {line["task"]: line["question"] for line in lines}
    for task, question in newest.items():
        of_task = [line for line in lines if (line["task"], line["question"]) == (task, question)]
        metric = next(iter(of_task[-1]["metrics"]))
        points = {}
        for line in of_task:
            tokens, value = float(line["tokens"]), number_of(line["metrics"].get(metric))
            error = number_of(line["metrics"].get("stderr"))
            if abs(value) < MOST:
                points[tokens] = (tokens, value, error if abs(error) < MOST else 0.0)
        tasks[task, metric] = sorted(points.values())
    return tasks


def _is_result(line: Mapping[str, Any]) -> bool:
    """True if a line is one that `nxtrain eval` writes."""
    named = isinstance(line.get("task"), str) and isinstance(line.get("question"), str)
    metrics = line.get("metrics")
    return named and abs(number_of(line.get("tokens"))) < MOST and isinstance(metrics, dict) and bool(metrics)
