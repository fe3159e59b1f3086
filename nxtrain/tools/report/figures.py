"""Charts of the HTML report: one for each metric and each task of `nxtrain eval`, with a curve per run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from nxtrain.common.errors import NxtrainError
from nxtrain.common.io import jsonl
from nxtrain.common.run_folder import EVALUATIONS_FILE
from nxtrain.common.text import short
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.tools import svg
from nxtrain.tools.report.chart import HEIGHT, MOST_MARKS, WIDTH, Curve, draw, smooth
from nxtrain.tools.report.columns import MOST, Column, number_of
from nxtrain.tools.report.facts import PARTS, typical
from nxtrain.tools.report.loss_chart import loss_unit
from nxtrain.tools.report.run import RecordedRun, shortened
from nxtrain.tools.report.verdict import verdict

NUM_COLORS = 8  # number of different colors of runs; further runs repeat them
FEWEST_SMOOTHED = 150  # minimum number of records for which a noisy curve gets a moving average
BINS = 160  # number of bins of steps in a breakdown of time

QUANTITIES = (
    ("param-norm", "Parameter norm", "", "param_norm", 1.0),
    ("lr", "Learning rate", "", "lr", 1.0),
    ("throughput", "Throughput", "tokens/s", "tokens_per_s", 1.0),
    ("step-time", "Step time", "ms", "step_time_s", 1e3),
    ("mfu", "Model FLOPs utilization", "%", "mfu", 100.0),
    ("memory", "Peak memory", "GiB, rank 0", "peak_memory_bytes", 1 / (1 << 30)),
    ("goodput", "Goodput", "% of the time since the first start", "goodput", 100.0),
    ("reward-accuracy", "Pairs in the preferred order", "%", "reward_accuracy", 100.0),
    ("kl", "Divergence from the reference", "nats per answer", "kl", 1.0),
    ("expert-load", "Load of the busiest expert", "times an even load", "expert_load_max", 1.0),
    ("idle-expert", "Load of the idlest expert", "times an even load", "expert_load_min", 1.0),
    ("router-entropy", "Entropy of the routers", "of even probabilities", "router_entropy", 1.0),
    ("dropped", "Slots beyond the capacity", "%", "dropped_share", 100.0),
    ("lost-updates", "Updates lost to rounding", "% of the parameters", "lost_update_frac", 100.0),
)
"""Charts of one metric each: key, title, unit, metric and scale."""

NOISY = ("throughput", "step-time", "mfu")  # charts with a moving average


def charts(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Charts of all metrics that at least one run recorded."""
    drawn = [_losses(runs), _difference(runs), _norms(runs), _rewards(runs)]
    for key, title, unit, column, scale in QUANTITIES:
        curves: list[Curve] = []
        for color, run in _colored(runs):
            steps, values = run.columns.series(column)
            name = _main(runs, run, title.lower())
            if key in NOISY:
                curves += _with_mean(name, color, steps, scale * values)
            else:
                curves.append(Curve(name, color, steps, scale * values))
        note = _mean_note(runs, column) if key in NOISY else ""
        drawn.append(draw(key, title, unit, curves, zero=key != "param-norm", note=note))
    return [chart for chart in drawn if chart is not None]


def difference(first: RecordedRun, other: RecordedRun, key: str = "loss") -> tuple[Column, Column, Column]:
    """Values of a metric at the steps that both runs recorded.

    Returns:
        Steps, values of the first run, values of the other run.
    """
    (steps_a, a), (steps_b, b) = first.columns.series(key), other.columns.series(key)
    steps, indices_a, indices_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    return steps, a[indices_a], b[indices_b]


def judge(run: RecordedRun) -> str:
    """Verdict on the resource that limits a run's speed; empty if no times are recorded."""
    from nxtrain.plan.hardware import find_machine

    sums = {}
    for key in (*KINDS_S, *SECTIONS_S):
        _, times_s = run.columns.series(key)
        if len(times_s):
            sums[key] = float(times_s.sum())
    intensities = None
    micro, length = run.number("train.micro_batch"), run.number("train.seq_len")
    with suppress(NxtrainError):  # no instance is named, or an unknown one
        machine = find_machine(str(run.config.get("cluster.instance") or ""))
        if micro and length:
            weight_bytes = 2
            if run.config.get("precision.params", "fp32") == "fp32":
                weight_bytes = 4
            # A forward pass reads each weight once, and does one multiplication and one addition with it per token.
            intensities = (machine.device_flops / machine.memory_bytes_s, 2 * micro * length / weight_bytes)
    queues = run.environment.get("asynchronous") is True and not any(key in sums for key in SECTIONS_S)
    return verdict(sums, mfu=typical(run, "mfu"), intensities=intensities, queues=queues)


def _losses(runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
    curves = []
    note = _mean_note(runs, "loss")
    for color, run in _colored(runs):
        curves += _with_mean(_main(runs, run, "training"), color, *run.columns.series("loss"))
        curves.append(Curve(_named(runs, run, "held-out"), color, *run.columns.series("val_loss"), kind="dots"))
    if any("val_loss" in run.columns.numbers for run in runs):
        note = f"Dots are evaluations on held-out text. {note}".strip()
    return draw("loss", "Loss", _units(runs), curves, note=note, wide=True)


def _units(runs: Sequence[RecordedRun]) -> str:
    return " or ".join(dict.fromkeys(loss_unit(run.columns.numbers) for run in runs))


def _mean_note(runs: Sequence[RecordedRun], column: str) -> str:
    if all(len(run.columns.series(column)[0]) < FEWEST_SMOOTHED for run in runs):
        return ""
    return "The faint line has every record, the strong line their mean."


def _difference(runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
    """Chart of each run's loss minus the first run's loss, at the steps that both recorded."""
    curves: list[Curve] = []
    for color, run in list(_colored(runs))[1:]:
        steps, first, other = difference(runs[0], run)
        curves += _with_mean(f"{run.name} - {runs[0].name}", color, steps, other - first)
    note = "At the steps that both runs recorded."
    return draw("difference", "Loss difference", _units(runs), curves, note=note, wide=True)


def _rewards(runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
    """Chart of the rewards of chosen and rejected answers, for runs on preference pairs."""
    curves = []
    for color, run in _colored(runs):
        curves.append(Curve(_named(runs, run, "chosen"), color, *run.columns.series("reward_chosen")))
        rejected = run.columns.series("reward_rejected")
        curves.append(Curve(_named(runs, run, "rejected"), color, *rejected, kind="dashed"))
    return draw("rewards", "Rewards of answers", "", curves, note="The distance of both lines is the margin.")


def _norms(runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
    curves = []
    for color, run in _colored(runs):
        steps, values = run.columns.series("grad_norm")
        curves.append(Curve(_main(runs, run, "gradient norm"), color, steps, values))
        means = run.columns.series("grad_norm_mean")
        curves.append(Curve(_named(runs, run, "mean of 20 steps"), color, *means, kind="dashed"))
        marked = np.array([step for step, _ in run.columns.spikes], dtype=np.float64)
        # A spike between two records has no recorded value, so its mark is drawn at the next record.
        at = np.unique(np.searchsorted(steps, marked))
        at = at[at < len(steps)]
        kind = "spikes" if len(runs) == 1 else "dots"
        curves.append(Curve(_named(runs, run, "spikes"), color, steps[at], values[at], kind))
    note = ""
    if any(run.columns.spikes for run in runs):
        note = "Dots are spikes above the running mean; one between two records is marked at the next."
    if any(len(run.columns.spikes) > MOST_MARKS for run in runs):
        note += f" Of many, the {MOST_MARKS} highest are marked."
    return draw("grad-norm", "Gradient norm", "before clipping", curves, note=note)


def _with_mean(name: str, color: int, steps: Column, values: Column) -> list[Curve]:
    """Curve of a metric; a long one becomes faint, with its moving average over a fiftieth of the records."""
    if len(values) < FEWEST_SMOOTHED:
        return [Curve(name, color, steps, values)]
    return [
        Curve(f"{name}, every record", color, steps, values, "faint"),
        Curve(name, color, steps, smooth(values, max(5, len(values) // 50))),
    ]


def breakdown(run: RecordedRun) -> dict[str, Any] | None:
    """Stacked areas of the host's time over steps, as shares that add up to one; None if no times are recorded.

    Returns:
        Data for the HTML template. `areas`: color, name, SVG path and share of each kind of time. `verdict`: sentence
        about the resource that limits the speed.
    """
    times = {key: run.columns.numbers[key] for key in PARTS if key in run.columns.numbers}
    if not times or not len(run.columns.steps):
        return None
    seconds = {key: np.nan_to_num(values) for key, values in times.items()}
    divided = [seconds[key] for key in SECTIONS_S if key in seconds]
    if divided and "training_s" in seconds:
        seconds["training_s"] = np.maximum(0.0, seconds["training_s"] - np.sum(divided, axis=0))
    edges = np.unique(np.linspace(0, len(run.columns.steps), min(BINS, len(run.columns.steps)) + 1).astype(np.intp))
    binned = {key: np.add.reduceat(values, edges[:-1]) for key, values in seconds.items()}
    whole = np.sum(list(binned.values()), axis=0)
    if not whole.sum() > 0:
        return None
    x = WIDTH * np.arange(len(whole) + 1) / len(whole)
    bottom = np.zeros(len(whole))
    areas = []
    for color, (key, label) in enumerate(PARTS.items()):
        if key not in binned or not binned[key].any():
            continue
        top = bottom + binned[key] / np.where(whole > 0, whole, 1)
        share = float(binned[key].sum() / whole.sum())
        name = label
        if divided and key == "training_s":
            name = "rest of the steps"
        areas.append((color, name, _area(x, HEIGHT * (1 - bottom), HEIGHT * (1 - top)), share))
        bottom = top
    last = len(run.columns.steps) - 1
    x_ticks = []
    for quarter in range(5):
        step = run.columns.steps[min(last, (last + 1) * quarter // 4)]
        x_ticks.append((25 * quarter, short(float(step))))
    sentence = judge(run)
    return {
        "name": run.name,
        "areas": areas,
        "x_ticks": x_ticks,
        "y_ticks": [(100 - part, f"{part}%") for part in (0, 50, 100)],
        "verdict": sentence[:1].upper() + sentence[1:],
    }


def _area(x: Column, low: Column, high: Column) -> str:
    """SVG path of an area between two step functions."""
    edges = np.repeat(x, 2)[1:-1]
    across = np.concatenate([edges, edges[::-1]])
    heights = np.concatenate([np.repeat(high, 2), np.repeat(low, 2)[::-1]])
    return svg.path(across.tolist(), heights.tolist(), digits=1) + "z"


def _main(runs: Sequence[RecordedRun], run: RecordedRun, quantity: str) -> str:
    """Name of a run's main curve in a chart: the metric for a single run, otherwise the run's name."""
    if len(runs) == 1:
        return quantity
    return run.name


def _named(runs: Sequence[RecordedRun], run: RecordedRun, quantity: str) -> str:
    """Name of a run's additional curve in a chart."""
    if len(runs) == 1:
        return quantity
    return f"{run.name}, {quantity}"


def _colored(runs: Sequence[RecordedRun]) -> Iterator[tuple[int, RecordedRun]]:
    return ((number % NUM_COLORS, run) for number, run in enumerate(runs))


MOST_TASKS = 40  # maximum number of tasks on the page; the first ones measured


def evaluations(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Charts of all evaluation tasks that have results, over training tokens."""
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
    """Tokens, value and standard error of each evaluated task and metric; an unknown error is 0.

    If the requests of a task changed, only results for its newest requests count.
    """
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
    """Return True if a line has the form that `nxtrain eval` writes."""
    named = isinstance(line.get("task"), str) and isinstance(line.get("question"), str)
    metrics = line.get("metrics")
    return named and abs(number_of(line.get("tokens"))) < MOST and isinstance(metrics, dict) and bool(metrics)
