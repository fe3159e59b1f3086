"""The charts of a page: one for each quantity, with a curve for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nxtrain.common.errors import NxtrainError
from nxtrain.common.text import short
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.tools import svg
from nxtrain.tools.report.chart import HEIGHT, MOST_MARKS, WIDTH, Chart, Curve, Tick, draw, smooth
from nxtrain.tools.report.columns import Column
from nxtrain.tools.report.facts import typical
from nxtrain.tools.report.run import RecordedRun
from nxtrain.tools.report.verdict import Balance, TimeVerdict, verdict

NUM_COLORS = 8
"""Colors of runs; further runs begin again."""

FEWEST_SMOOTHED = 150
"""Records from which a noisy curve gets its mean drawn over it."""

BINS = 160
"""Columns of a breakdown."""

PARTS = {
    "data_s": "waiting for data",
    "forward_s": "forward",
    "backward_s": "backward",
    "reduce_s": "reduction",
    "optimizer_s": "update",
    "training_s": "steps",
    "waiting_s": "waiting for other ranks",
    "log_s": "reading numbers",
    "vote_s": "comparing replicas",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoint",
}
"""Kinds of work, in the order of the legend."""


@dataclass(frozen=True)
class Breakdown:
    """Breakdown of a run's time, for the template of the page.

    Args:
        areas: Number of the color, name, SVG path and share of each kind of work.
        verdict: Sentence that names the limit.
    """

    name: str
    areas: tuple[tuple[int, str, str, float], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    verdict: str


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Charts of some runs; a quantity that no run recorded has none."""
    loss_note = _mean_note(runs, "loss")
    if any("val_loss" in run.columns.numbers for run in runs):
        loss_note = f"Dots are evaluations on held-out text. {loss_note}".strip()
    drawn = [
        draw("loss", "Loss", "nats per token", list(_losses(runs)), wide=True, note=loss_note),
        _difference(runs),
        draw("grad-norm", "Gradient norm", "before clipping", list(_norms(runs)), note=_spike_note(runs)),
        _plain(runs, "param-norm", "Parameter norm", "", "param_norm"),
        _plain(runs, "lr", "Learning rate", "", "lr", zero=True),
        _noisy(runs, "throughput", "Throughput", "tokens/s", "tokens_per_s", zero=True),
        _noisy(runs, "step-time", "Step time", "ms", "step_time_s", scale=1e3, zero=True),
        _noisy(runs, "mfu", "Model FLOPs utilization", "%", "mfu", scale=100, zero=True),
        _plain(runs, "memory", "Peak memory", "GiB, rank 0", "peak_memory_bytes", scale=1 / (1 << 30), zero=True),
        _plain(runs, "goodput", "Goodput", "% of the time since the first start", "goodput", scale=100, zero=True),
        _plain(
            runs,
            "lost-updates",
            "Updates lost to rounding",
            "% of the parameters",
            "lost_update_frac",
            scale=100,
            zero=True,
        ),
    ]
    return [chart for chart in drawn if chart is not None]


def difference(first: RecordedRun, other: RecordedRun, key: str = "loss") -> tuple[Column, Column, Column]:
    """Steps that two runs both recorded, with the values of each."""
    (steps_a, a), (steps_b, b) = first.columns.series(key), other.columns.series(key)
    steps, indices_a, indices_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    return steps, a[indices_a], b[indices_b]


def breakdowns(runs: Sequence[RecordedRun]) -> list[Breakdown]:
    """Breakdown of each run that recorded its times."""
    drawn = [_breakdown(run) for run in runs]
    return [breakdown for breakdown in drawn if breakdown is not None]


def judge(run: RecordedRun) -> TimeVerdict | None:
    """Verdict on a run's time; None if no times are recorded."""
    sums = {}
    for key in (*KINDS_S, *SECTIONS_S):
        _, times_s = run.columns.series(key)
        if len(times_s):
            sums[key] = float(times_s.sum())
    mfu = typical(run, "mfu")
    queues = run.environment.get("asynchronous") is True and not any(key in sums for key in SECTIONS_S)
    return verdict(sums, mfu=mfu, balance=_balance(run), queues=queues)


def _balance(run: RecordedRun) -> Balance | None:
    """Arithmetic of the machine that `cluster.instance` names, and of a micro-batch; None if either is unknown."""
    from nxtrain.plan.hardware import find_machine

    micro, length = run.number("train.micro_batch"), run.number("train.seq_len")
    try:
        machine = find_machine(str(run.config.get("cluster.instance") or ""))
    except NxtrainError:
        return None
    if not micro or not length:
        return None
    weight_bytes = 2
    if run.config.get("precision.params", "fp32") == "fp32":
        weight_bytes = 4
    # Each weight of a pass is read once, and multiplied and added for each token.
    return Balance(machine.device_flops / machine.memory_bytes_s, 2 * micro * length / weight_bytes)


def _losses(runs: Sequence[RecordedRun]) -> Iterator[Curve]:
    for color, run in _colored(runs):
        yield from _with_mean(_main(runs, run, "training"), color, *run.columns.series("loss"))
        steps, values = run.columns.series("val_loss")
        yield Curve(_named(runs, run, "held-out"), color, steps, values, "dots")


def _mean_note(runs: Sequence[RecordedRun], column: str) -> str:
    if all(len(run.columns.series(column)[0]) < FEWEST_SMOOTHED for run in runs):
        return ""
    return "The faint line has every record, the strong line their mean."


def _difference(runs: Sequence[RecordedRun]) -> Chart | None:
    """Loss of each run minus that of the first, at the steps that both recorded."""
    if len(runs) == 1:
        return None
    curves = []
    for color, run in list(_colored(runs))[1:]:
        steps, first, other = difference(runs[0], run)
        curves += _with_mean(f"{run.name} - {runs[0].name}", color, steps, other - first)
    note = "At the steps that both runs recorded."
    return draw("difference", "Loss difference", "nats per token", curves, note=note, wide=True)


def _norms(runs: Sequence[RecordedRun]) -> Iterator[Curve]:
    for color, run in _colored(runs):
        steps, values = run.columns.series("grad_norm")
        yield Curve(_main(runs, run, "gradient norm"), color, steps, values)
        yield Curve(_named(runs, run, "mean of 20 steps"), color, *run.columns.series("grad_norm_mean"), kind="dashed")
        marked = np.array([step for step, _ in run.columns.spikes], dtype=np.float64)
        # A spike between two records has no value of its own: its mark stands at the next record.
        at = np.unique(np.searchsorted(steps, marked))
        at = at[at < len(steps)]
        kind = "spikes" if len(runs) == 1 else "dots"
        yield Curve(_named(runs, run, "spikes"), color, steps[at], values[at], kind)


def _spike_note(runs: Sequence[RecordedRun]) -> str:
    if not any(run.columns.spikes for run in runs):
        return ""
    note = "Dots are spikes above the running mean; one between two records is marked at the next."
    if any(len(run.columns.spikes) > MOST_MARKS for run in runs):
        note += f" Of many, the {MOST_MARKS} highest are marked."
    return note


def _plain(
    runs: Sequence[RecordedRun], key: str, title: str, unit: str, column: str, *, scale: float = 1.0, zero: bool = False
) -> Chart | None:
    curves = []
    for color, run in _colored(runs):
        steps, values = run.columns.series(column)
        curves.append(Curve(_main(runs, run, title.lower()), color, steps, scale * values))
    return draw(key, title, unit, curves, zero=zero)


def _noisy(
    runs: Sequence[RecordedRun], key: str, title: str, unit: str, column: str, *, scale: float = 1.0, zero: bool = False
) -> Chart | None:
    curves: list[Curve] = []
    for color, run in _colored(runs):
        steps, values = run.columns.series(column)
        curves += _with_mean(_main(runs, run, title.lower()), color, steps, scale * values)
    return draw(key, title, unit, curves, zero=zero, note=_mean_note(runs, column))


def _with_mean(name: str, color: int, steps: Column, values: Column) -> list[Curve]:
    """A curve; if long enough, with its mean over a fiftieth of the records drawn over it."""
    if len(values) < FEWEST_SMOOTHED:
        return [Curve(name, color, steps, values)]
    return [
        Curve(f"{name}, every record", color, steps, values, "faint"),
        Curve(name, color, steps, smooth(values, max(5, len(values) // 50))),
    ]


def _breakdown(run: RecordedRun) -> Breakdown | None:
    """Areas of the host's time over steps, in shares that add up to one."""
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
    ticks = tuple(
        Tick(
            100 * at / 4,
            short(float(run.columns.steps[min(len(run.columns.steps) - 1, len(run.columns.steps) * at // 4)])),
        )
        for at in range(5)
    )
    shares = tuple(Tick(100 - part, f"{part}%") for part in (0, 50, 100))
    sentence = str(judge(run) or "")
    return Breakdown(run.name, tuple(areas), ticks, shares, sentence[:1].upper() + sentence[1:])


def _area(x: Column, low: Column, high: Column) -> str:
    """Path of an area of columns."""
    edges = np.repeat(x, 2)[1:-1]
    across = np.concatenate([edges, edges[::-1]])
    heights = np.concatenate([np.repeat(high, 2), np.repeat(low, 2)[::-1]])
    return svg.path(across.tolist(), heights.tolist(), digits=1) + "z"


def _main(runs: Sequence[RecordedRun], run: RecordedRun, quantity: str) -> str:
    """Name of the main curve of a chart: with one run its quantity, with several the run."""
    if len(runs) == 1:
        return quantity
    return run.name


def _named(runs: Sequence[RecordedRun], run: RecordedRun, quantity: str) -> str:
    """Name of a further curve of a chart."""
    if len(runs) == 1:
        return quantity
    return f"{run.name}, {quantity}"


def _colored(runs: Sequence[RecordedRun]) -> Iterator[tuple[int, RecordedRun]]:
    return ((number % NUM_COLORS, run) for number, run in enumerate(runs))
