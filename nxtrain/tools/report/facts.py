"""Tables of the HTML report: overview, stability, times of ranks, plan compared with measurement, configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from nxtrain.common.errors import NxtrainError
from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import CONFIG_FILE, LOGS_DIR, RANKS_FILE
from nxtrain.common.text import duration, short, size
from nxtrain.config.tables import toml_value
from nxtrain.tools.report.run import RecordedRun, shortened

FIT_FROM = 0.2  # share of the first steps, which the fit of the loss leaves out
FEWEST_FITTED = 20  # minimum number of records for a fit
LONGEST_VALUE = 300  # maximum number of characters of a configuration value in a table


@dataclass(frozen=True)
class Table:
    """Table of the report with one row per quantity and one column per run."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()  # numbers of rows whose cells differ

    @property
    def differing(self) -> list[tuple[str, ...]]:
        """Rows whose cells differ between runs."""
        return [row for number, row in enumerate(self.rows) if number in self.marked]


def overview(runs: Sequence[RecordedRun]) -> Table:
    """Table of the main results of each run."""
    return _table([dict(_overview(run)) for run in runs], runs)


def stability(runs: Sequence[RecordedRun]) -> Table:
    """Table of training stability of each run: gradient norm spikes, alarms, skipped steps and parameter norms."""
    return _table([dict(_stability(run)) for run in runs], runs)


def planned(run: RecordedRun) -> tuple[Table | None, str]:
    """Table of a run's planned and measured figures, with a sentence about the plan.

    The table is None if there is no plan. The sentence then has the reason.
    """
    if not run.config:
        return None, f"There is no plan, since there is no {CONFIG_FILE}."
    if not run.config.get("cluster.instance"):
        return None, "There is no plan, since cluster.instance names no machine."
    from nxtrain.plan.command import Question, predict
    from nxtrain.plan.hardware import find_machine
    from nxtrain.plan.predict import Assumptions

    try:
        prediction, _ = predict(run.folder / CONFIG_FILE, [], Question(), Assumptions())
        plan = prediction.to_json()
    except (NxtrainError, OSError) as error:
        return None, f"The plan of this configuration failed: {shortened(str(error), 300)}"
    goodput = ""
    spent_usd = None
    price = find_machine(str(run.config["cluster.instance"])).price_usd_h
    if run.starts:
        goodput = _percent(run.goodput.goodput)
        if price:
            spent_usd = price * plan["nodes"] * run.goodput.wall_s / 3600  # since the first start
    rows = [
        ("step time", duration(plan["step_time_s"]), _text(typical(run, "step_time_s"), duration)),
        ("tokens/s", short(plan["tokens_per_s"]), _text(typical(run, "tokens_per_s"), short)),
        ("MFU", f"{plan['mfu']:.1%}", _text(typical(run, "mfu"), _percent)),
        ("memory of a rank", size(plan["bytes"]["total"]), _text(_peak(run), size)),
        ("goodput", f"{plan['checkpoint']['goodput']:.1%}", goodput),
        ("cost", _text(plan["cost_usd"], _usd), _text(spent_usd, _usd)),
    ]
    sentence = f"For {plan['nodes']} x {plan['instance']}; {plan['speed_basis']}."
    backend = run.environment.get("backend")
    if backend:
        sentence += f" Measured on backend {_plain(backend)}."
    return Table(("", "planned", "measured"), tuple(rows)), sentence


def configuration(runs: Sequence[RecordedRun]) -> Table:
    """Table of all configuration values; with several runs, differing rows are marked."""
    rows = []
    for key in dict.fromkeys(chain.from_iterable(run.config for run in runs)):
        values = [shortened(run.value(key), LONGEST_VALUE) for run in runs]
        rows.append((shortened(key), *values))
    differ = frozenset(at for at, row in enumerate(rows) if len(set(row[1:])) > 1)
    return Table(("key", *(run.name for run in runs)), tuple(rows), differ)


def environment(runs: Sequence[RecordedRun]) -> Table:
    """Table of the software and hardware environment of each run's newest start."""
    columns = []
    for run in runs:
        columns.append({shortened(k): shortened(_plain(v), LONGEST_VALUE) for k, v in run.environment.items()})
    return _table(columns, runs)


def typical(run: RecordedRun, key: str) -> float | None:
    """Median of a metric over the run; None if the metric has no values."""
    _, values = run.columns.series(key)
    if not len(values):
        return None
    return float(np.median(values))


def fit_of(run: RecordedRun) -> dict[str, float] | None:
    """Fit the training loss by a straight line over the logarithm of the step.

    The first `FIT_FROM` of the steps are left out.

    Returns:
        `first`: first step of the fit. `slope`: change of the loss when steps grow tenfold. `spread`: standard
        deviation of the losses around the line. None if there are too few records.
    """
    steps, losses = run.columns.series("loss")
    if len(steps):
        late = (steps > FIT_FROM * steps[-1]) & (steps > 0)
        steps, losses = steps[late], losses[late]
    if len(steps) < FEWEST_FITTED:
        return None
    x = np.log10(steps)
    centered = x - x.mean()
    slope = float((centered * losses).sum() / (centered * centered).sum())
    rest = losses - losses.mean() - slope * centered
    return {"first": float(steps[0]), "slope": slope, "spread": float(rest.std())}


def results(run: RecordedRun) -> dict[str, Any]:
    """Convert the main results of a run to JSON types."""
    columns = run.columns
    step = 0
    if len(columns.steps):
        step = int(columns.steps[-1])
    keys = ("loss", "val_loss", "grad_norm", "param_norm", "tokens", "peak_memory_bytes")
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": run.state,
        "step": step,
        **{key: columns.last(key) for key in keys},
        **{key: typical(run, key) for key in ("tokens_per_s", "step_time_s", "mfu")},
        "starts": len(run.starts),
        "goodput": run.goodput.record() if run.starts else None,
        "spikes": len(columns.spikes),
        "spikes_of_one_step": sum(length == 1 for _, length in columns.spikes),
        "alarms": columns.num_alarms,
        "skipped_steps": len(columns.skipped),
        "loss_fit": fit_of(run),
        "notes": list(run.notes),
    }


def _overview(run: RecordedRun) -> Iterator[tuple[str, str]]:
    columns = run.columns
    yield "state", run.state
    total = run.number("train.steps")
    step = "0"
    if len(columns.steps):
        step = f"{columns.steps[-1]:,.0f}"
    if total:
        step += f" / {total:,.0f}"
    yield "step", step
    yield "loss", _text(columns.last("loss"), "{:.4f}".format)
    yield "held-out loss", _text(columns.last("val_loss"), "{:.4f}".format)
    if "reward_margin" in columns.numbers:
        yield "margin of rewards", _text(columns.last("reward_margin"), "{:.4f}".format)
        yield "pairs in order", _text(columns.last("reward_accuracy"), _percent)
    if "expert_load_max" in columns.numbers:
        yield "load of experts, least", _text(columns.last("expert_load_min"), "{:.2f}".format)
        yield "load of experts, greatest", _text(columns.last("expert_load_max"), "{:.2f}".format)
        yield "entropy of routers", _text(columns.last("router_entropy"), "{:.2f}".format)
        yield "dropped slots", _text(columns.last("dropped_share"), _percent)
    bits = run.summary.get("bits_per_byte")
    if isinstance(bits, float) and math.isfinite(bits):
        yield "bits per byte", f"{bits:.4f}"
    yield "tokens", _text(columns.last("tokens"), short)
    yield "tokens/s", _text(typical(run, "tokens_per_s"), short)
    yield "step time", _text(typical(run, "step_time_s"), duration)
    yield "MFU", _text(typical(run, "mfu"), _percent)
    yield "peak memory", _text(_peak(run), size)
    if run.starts:
        yield "goodput", _percent(run.goodput.goodput)
        yield "starts", f"{run.goodput.starts:,}"
        yield "time", duration(run.goodput.wall_s)
        yield "steps lost", f"{run.goodput.lost_steps:,}"


def _stability(run: RecordedRun) -> Iterator[tuple[str, str]]:
    columns = run.columns
    if not len(columns.steps):
        return
    lengths = [length for _, length in columns.spikes]
    if "grad_norm_mean" in columns.numbers:
        yield "spikes of the gradient norm", f"{len(lengths):,}"
        if lengths:
            yield "of one step", f"{lengths.count(1) / len(lengths):.0%}"
            yield "longest spike, in steps", f"{max(lengths):,}"
        mean, lowest = columns.last("grad_norm_mean"), columns.last("grad_norm_lowest")
        if mean is not None and lowest:
            yield "running mean, lowest", short(lowest)
            yield "growth over the lowest", f"{mean / lowest:.2f} times"
    yield "alarms", f"{columns.num_alarms:,}"
    yield "steps that updated nothing", f"{len(columns.skipped):,}"
    fit = fit_of(run)
    if fit:
        yield "loss by a tenfold of steps", f"{fit['slope']:+.3f} after step {fit['first']:,.0f}"
        yield "spread around that line", f"{fit['spread']:.3f}"
    first, expected = columns.last("param_norm_0"), columns.last("param_norm_expected")
    if first is not None and expected is not None:
        yield "parameter norm, step 0", short(first)
        yield "parameter norm of the initialization", short(expected)
    steps, norms = columns.series("param_norm")
    if len(norms):
        yield f"parameter norm, first (step {steps[0]:,.0f})", short(float(norms[0]))
        yield "parameter norm, last", short(float(norms[-1]))


def _table(columns: Sequence[dict[str, str]], runs: Sequence[RecordedRun]) -> Table:
    rows = []
    for key in dict.fromkeys(chain.from_iterable(columns)):
        cells = [column.get(key, "") for column in columns]
        if any(cells):
            rows.append((key, *cells))
    return Table(("", *(run.name for run in runs)), tuple(rows))


def _peak(run: RecordedRun) -> float | None:
    _, values = run.columns.series("peak_memory_bytes")
    if not len(values):
        return None
    return float(values.max())


def _usd(value: float) -> str:
    if value >= 1:
        return f"{value:,.2f} USD"
    return f"{value:.2g} USD"


def _text(value: float | None, write: Any) -> str:
    if value is None:
        return ""
    return str(write(value))


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    return toml_value(value)


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
"""Names of the kinds of time in a metrics record, by key, in the order of legends and columns."""

SHOWN = 8  # maximum number of ranks in the table; the busiest ones
MOST_S = 1e9  # largest time in seconds that is accepted as valid


def read_rates(folder: Path) -> dict[int, dict[str, float]]:
    """Read the seconds per step of each rank by kind of time; empty if the file is missing or damaged."""
    keys = {key.removesuffix("_s"): key for key in PARTS}
    try:
        content = json.loads(read_text(folder / LOGS_DIR / RANKS_FILE))
        rates = {}
        for rank, rate in content.items():
            rates[int(rank)] = {key: float(rate[kind]) for kind, key in keys.items() if kind in rate}
    except (AttributeError, OSError, OverflowError, RecursionError, TypeError, ValueError):
        return {}
    for rank, rate in rates.items():
        if rank < 0 or not all(0 <= s <= MOST_S for s in rate.values()):
            return {}
    return rates


def rank_times(run: RecordedRun) -> tuple[Table | None, str]:
    """Table of the milliseconds per step of the busiest ranks, with a sentence; None for a single rank."""
    rates = read_rates(run.folder)
    if len(rates) < 2:  # noqa: PLR2004 - a rank and another
        return None, ""
    kinds = []
    middle = {}
    for kind in PARTS:
        times_s = [rate.get(kind, 0.0) for rate in rates.values()]
        if max(times_s) >= 5e-7:  # noqa: PLR2004 - less would be written as 0.00 ms
            kinds.append(kind)
            middle[kind] = median_low(times_s)
    busy_s = {}
    for rank, rate in rates.items():
        busy_s[rank] = sum(s for kind, s in rate.items() if kind != "waiting_s")
    shown = sorted(rates, key=lambda rank: (-busy_s[rank], rank))[:SHOWN]

    def row(name: str, of: Mapping[str, float]) -> tuple[str, ...]:
        return name, *(f"{1e3 * of.get(kind, 0.0):.2f}" for kind in kinds), f"{1e3 * sum(of.values()):.2f}"

    # The medians of the kinds do not add up to a step, so their row has no sum.
    rows = [*(row(f"rank {rank}", rates[rank]) for rank in shown), (*row("median", middle)[:-1], "")]
    slowest = shown[0]
    excess_s = {kind: rates[slowest].get(kind, 0.0) - middle[kind] for kind in kinds}
    worst = max(kinds, key=lambda kind: -1.0 if kind == "waiting_s" else excess_s[kind])
    sentence = f"Milliseconds per step over the last steps. Rank {slowest} is the busiest"
    if excess_s[worst] > 0:
        sentence += f", by {1e3 * excess_s[worst]:.2f} ms in {PARTS[worst]}"
    sentence += "."
    if len(rates) > SHOWN:
        sentence += f" The {SHOWN} busiest of {len(rates):,} ranks are shown."
    return Table(("", *(PARTS[kind] for kind in kinds), "sum"), tuple(rows)), sentence
