"""Speed of two ranks in each layout, next to one rank and next to two independent runs at once, in turns.

Two independent runs at once are what the machine has to give: they share its memory and its clock, and wait for nobody.
Each rank is a process of one thread. Two ranks train on twice the sequences of one, whatever the layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.tools.bench.chart import check_chart, draw, spread
from nxtrain.tools.bench.train import Workload
from nxtrain.tools.bench.turns import BenchWorker, machine, machine_line, median_ratio, rank_environments

ALONE = "alone"
ONE = "one"
TWO = "two_independent"

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "zero1": {"shard": "zero1"},
    "pp2": {"pp": 2},
}
"""Table [parallel] of two ranks."""

RANKS = 2


def bench_scaling(
    *, work: Workload, layouts: Sequence[str], rounds: int, as_json: bool, chart: Path | None = None
) -> None:
    """Measure and print.

    Args:
        work: Workload of each rank.
        layouts: Names from `LAYOUTS`; empty: all.
        rounds: Turns of each, after one that warms up.
        as_json: Print JSON instead of tables.
        chart: SVG file to draw the efficiencies into.

    Raises:
        ConfigError: There is no such layout, or the chart cannot be written.
    """
    check_chart(chart)
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown:
        hint = f"known: {', '.join(LAYOUTS)}"
        raise ConfigError([Problem("--layouts", f"there is no layout {name!r}", hint=hint) for name in unknown])
    names = list(layouts or LAYOUTS)
    measured, parts = measure(work, names, rounds)
    result = {
        "machine": machine(),
        **asdict(work),
        "rounds": rounds,
        **summarize(measured, work.steps * work.batch * work.seq_len),
        "breakdown": parts,
    }
    if chart is not None:
        of = {row["name"]: row["rounds"] for row in result["rows"]}
        bars = {}
        for name in names:
            bars[name] = spread([ours / two for ours, two in zip(of[name], of[TWO], strict=True)])
        draw(chart, bars, "nxtrain bench scaling: two ranks over two independent runs", result["machine"])
    if as_json:
        write_document(result)
    else:
        _show(result)


def measure(
    work: Workload, names: Sequence[str], rounds: int
) -> tuple[dict[str, list[list[dict[str, Any]]]], dict[str, Any]]:
    """Turns of the processes of each measurement, without the warm-up; and the parts of a step of rank 0."""
    job = json.dumps(asdict(work))
    module = "nxtrain.tools.bench.scaling_rank"
    # A round has a turn of each layout, of one rank and of two; the parts of a step take about as long.
    total = (rounds + 1) * (len(names) + 2) + len(names)
    with ExitStack() as stack, Progress("starting", total) as progress:

        def start(name: str, environments: Sequence[Mapping[str, str]]) -> list[BenchWorker]:
            return [stack.enter_context(BenchWorker(module, name, job, env)) for env in environments]

        alone = start(ALONE, rank_environments(1) * RANKS)
        groups = {ONE: alone[:1], TWO: alone, **{name: start(name, rank_environments(RANKS)) for name in names}}
        measured: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in groups}
        for done, (number, name) in enumerate(product(range(rounds + 1), groups)):
            progress.show(done, f"round {number} of {rounds}: {name}")
            measured[name].append(_at_once(groups[name]))
        parts = {}
        for done, name in enumerate(names, total - len(names)):
            progress.show(done, f"parts of a step: {name}")
            parts[name] = _at_once(groups[name], "breakdown")[0]
    return {name: turns[1:] for name, turns in measured.items()}, parts


def _at_once(workers: Sequence[BenchWorker], request: str = "") -> list[dict[str, Any]]:
    for worker in workers:
        worker.begin(request)
    return [json.loads(worker.end()) for worker in workers]


def summarize(measured: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], tokens: int) -> dict[str, Any]:
    """Tokens per second by wall time, CPU seconds per token, and both over those of two independent runs.

    Args:
        measured: By name, for each round, the seconds of each process by clock.
        tokens: Tokens of one rank in one turn.
    """
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    rows = []
    for name, rounds in measured.items():
        wall[name] = []
        cpu[name] = []
        waited = []
        for processes in rounds:
            # Independent runs end on their own; ranks of a layout end together, and the slower counts.
            if name in (ONE, TWO):
                wall[name].append(sum(tokens / one["wall"] for one in processes))
            else:
                wall[name].append(RANKS * tokens / max(one["wall"] for one in processes))
            cpu[name].append(sum(one["cpu"] for one in processes) / (len(processes) * tokens))
            waited.append(max(one["waited"] / one["wall"] for one in processes))
        rows.append(
            {
                "name": name,
                "value": median(wall[name]),
                "unit": "tokens/s",
                "rounds": wall[name],
                "cpu_s_per_token": {"value": median(cpu[name]), "rounds": cpu[name]},
                "waited": median(waited),
            }
        )
    layouts = [name for name in measured if name not in (ONE, TWO)]
    return {
        "rows": rows,
        "ratios": {name: median_ratio(wall[name], wall[TWO]) for name in layouts},
        "cpu_ratios": {name: median_ratio(cpu[TWO], cpu[name]) for name in layouts},
        "over_one": {name: median_ratio(wall[name], wall[ONE]) for name in (TWO, *layouts)},
    }


def _show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    table = Table(title="two ranks of one thread each", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for head in ("tokens/s", "over one", "efficiency", "by CPU", "waiting", "comm."):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        name = row["name"]
        cells = [name.replace("_", " "), f"{row['value']:.0f}"]
        if name in result["over_one"]:
            cells.append(f"{result['over_one'][name]:.2f}")
        if name in result["ratios"]:
            cells += [f"{result['ratios'][name]:.1%}", f"{result['cpu_ratios'][name]:.1%}", f"{row['waited']:.1%}"]
        if name in result["breakdown"]:
            cells.append(f"{result['breakdown'][name]['kinds']['communication']['share']:.1%}")
        table.add_row(*cells)
    table.caption = (
        "over one: tokens/s over those of one rank; efficiency: over those of two independent runs at once; by CPU: "
        "CPU seconds per token of these over its own; waiting: of wall time, the rank that waits most; comm.: "
        f"communication, of the profiled step; medians over {result['rounds']} rounds"
    )
    console.print(table)
