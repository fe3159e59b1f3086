"""Benchmark of two ranks in each parallel layout, compared with one rank and with two independent runs.

The measurements alternate in rounds. Two independent runs at the same time show the most that a machine can give. They
share memory bandwidth and clock frequency, and do not communicate. Each rank is a process with one thread. Two ranks
train on twice as many sequences as one rank, in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from nxtrain.common.process.progress import Progress
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.chart import check_chart, write_chart
from nxtrain.tools.bench.harness import PATIENCE_S, measure_concurrently, median_ratio, start_ranks, take_turns
from nxtrain.tools.bench.train import BREAKDOWN, Workload

ONE, TWO = "one", "two_independent"

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "zero1": {"shard": "zero1"},
    "pp2": {"pp": 2},
}
"""Table `[parallel]` of each two-rank layout, by the layout's name."""

RANKS = 2


def bench_scaling(
    *, work: Workload, layouts: Sequence[str], rounds: int, as_json: bool, chart: Path | None = None
) -> None:
    """Measure the training speed of two ranks in each layout, and print the results.

    Args:
        layouts: Names from `LAYOUTS`; empty: all.
        chart: SVG file for a bar chart of the results; None: no chart.
    """
    check_chart(chart)
    harness.refuse_unknown("--layouts", "layout", layouts, LAYOUTS)
    names = list(layouts or LAYOUTS)
    measured, parts = measure(work, names, rounds)
    result = {
        "machine": harness.machine(),
        **asdict(work),
        "rounds": rounds,
        **summarize(measured, work.steps * work.batch * work.seq_len),
        "breakdown": parts,
    }
    if chart is not None:
        speeds = {row["name"]: row["rounds"] for row in result["rows"]}
        bars = {}
        for name in names:
            bars[name] = [ours / two for ours, two in zip(speeds[name], speeds[TWO], strict=True)]
        write_chart(chart, bars, "nxtrain bench scaling: two ranks over two independent runs", result["machine"])
    harness.present(result, lambda: [_table(result)], as_json=as_json)


def turns(layout: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Make the functions that measure one rank of a layout in a worker process, keyed by request.

    A timed measurement also has the seconds that the rank waited for the other rank.
    """
    import torch

    from nxtrain.backends import open_backend
    from nxtrain.backends.base import BackendSettings
    from nxtrain.tools.bench.clocks import clocks_of
    from nxtrain.tools.bench.training import ours, parts, timed

    work = Workload(**job)
    torch.set_num_threads(work.threads)
    backend = open_backend(work.backend, BackendSettings(hang_timeout_s=PATIENCE_S))
    step, state = ours(work, backend, parallel=LAYOUTS.get(layout))
    turn = timed(step, work.steps, clocks_of(backend), backend, warm_up_steps=1)

    def turn_with_waits() -> dict[str, Any]:
        backend.collectives.barrier()
        before = backend.diagnostics.waited_s()
        measured = turn()
        return {**measured, "waited": backend.diagnostics.waited_s() - before}

    return {"": turn_with_waits, BREAKDOWN: parts(step, state, backend)}


def measure(
    work: Workload, names: Sequence[str], rounds: int
) -> tuple[dict[str, list[list[dict[str, Any]]]], dict[str, Any]]:
    """Measure the training speed of each two-rank layout, of one rank, and of two independent runs.

    Returns:
        Measurements of all processes in every round, by name; breakdown of one step of rank 0, by layout.
    """
    job = asdict(work)
    with ExitStack() as stack:
        alone = start_ranks(stack, "scaling", ONE, job, copies=RANKS)
        groups = {ONE: alone[:1], TWO: alone}
        for name in names:
            groups[name] = start_ranks(stack, "scaling", name, job, RANKS)
        measured = take_turns({name: partial(measure_concurrently, group) for name, group in groups.items()}, rounds)
        parts = {}
        with Progress("parts of a step", len(names)) as progress:
            for done, name in enumerate(names):
                progress.show(done, f"parts of a step: {name}")
                parts[name] = measure_concurrently(groups[name], BREAKDOWN)[0]
    return measured, parts


def summarize(measured: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], tokens: int) -> dict[str, Any]:
    """Tokens per second of wall time and CPU seconds per token, and their ratios to two independent runs."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    rows = []
    for name, rounds in measured.items():
        wall[name] = []
        cpu[name] = []
        waited = []
        for processes in rounds:
            # The speeds of independent runs add up. Ranks of a layout end together, so the slower rank counts.
            if name in (ONE, TWO):
                wall[name].append(sum(tokens / one["wall"] for one in processes))
            else:
                wall[name].append(RANKS * tokens / max(one["wall"] for one in processes))
            cpu[name].append(sum(one["cpu"] for one in processes) / (len(processes) * tokens))
            waited.append(max(one["waited"] / one["wall"] for one in processes))
        cpu_s = {"value": median(cpu[name]), "rounds": cpu[name]}
        rows.append(harness.row(name, "tokens/s", wall[name], cpu_s_per_token=cpu_s, waited=median(waited)))
    layouts = [name for name in measured if name not in (ONE, TWO)]
    return {
        "rows": rows,
        "ratios": {name: median_ratio(wall[name], wall[TWO]) for name in layouts},
        "cpu_ratios": {name: median_ratio(cpu[TWO], cpu[name]) for name in layouts},
        "over_one": {name: median_ratio(wall[name], wall[ONE]) for name in (TWO, *layouts)},
    }


def _table(result: Mapping[str, Any]) -> Table:
    rows = []
    for row in result["rows"]:
        name = row["name"]
        cells = [name.replace("_", " "), f"{row['value']:.0f}"]
        if name in result["over_one"]:
            cells.append(f"{result['over_one'][name]:.2f}")
        if name in result["ratios"]:
            communication = result["breakdown"][name]["kinds"]["communication"]["share"]
            shares = (result["ratios"][name], result["cpu_ratios"][name], row["waited"], communication)
            cells += [f"{share:.1%}" for share in shares]
        rows.append(cells)
    caption = (
        "over one: tokens/s over those of one rank; efficiency: over those of two independent runs at once; by CPU: "
        "CPU seconds per token of these over its own; waiting: of wall time, the rank that waits most; comm.: "
        f"communication, of the profiled step; medians over {result['rounds']} rounds"
    )
    heads = ("", "tokens/s", "over one", "efficiency", "by CPU", "waiting", "comm.")
    return harness.table("two ranks of one thread each", heads, rows, caption)
