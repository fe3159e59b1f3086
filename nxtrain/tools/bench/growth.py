"""Growth of cost: CPU time of a step, a start, a checkpoint and a trace against their sizes.

Each curve has an exponent, the slope of the logarithm of time over that of size: 1 is linear growth, 0 is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.backends.xla.environment import trace_environment
from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.process.document import write_document
from nxtrain.tools.bench.chart import check_chart, draw, spread
from nxtrain.tools.bench.turns import BenchWorker, environment, machine, machine_line, started, take_turns

SEQ_LEN = "seq_len"
LAYERS = "layers"
ACCUMULATION = "accumulation"
START = "start"
CHECKPOINT = "checkpoint"
WORLD = "world"


@dataclass(frozen=True)
class GrowthCurve:
    """Sizes to measure at.

    Args:
        sizes: Ascending.
        exponent: Of linear or constant cost.
        text: Description for people.
    """

    sizes: tuple[int, ...]
    exponent: float
    text: str


CURVES = {
    SEQ_LEN: GrowthCurve((128, 256, 512, 1024), 1.0, "step against tokens per sequence; attention adds to 1"),
    LAYERS: GrowthCurve((2, 4, 8, 16), 1.0, "step against blocks"),
    ACCUMULATION: GrowthCurve((1, 2, 4, 8), 1.0, "step against micro-batches"),
    START: GrowthCurve((2, 4, 8, 16), 1.0, "model built and drawn against blocks; vocabulary is constant"),
    CHECKPOINT: GrowthCurve((12, 24, 48, 96), 1.0, "checkpoint saved and loaded against MiB"),
    WORLD: GrowthCurve((8, 64, 512, 4096), 0.0, "trace of one rank against ranks of the world, tp=8"),
}


@dataclass(frozen=True)
class GrowthJob:
    """One curve.

    Args:
        curve: Name in `CURVES`.
        sizes: Sizes to measure at.
    """

    curve: str
    sizes: Sequence[int]


def bench_growth(*, curves: Sequence[str], points: int, rounds: int, as_json: bool, chart: Path | None = None) -> None:
    """Measure and print.

    Args:
        curves: Names from `CURVES`; empty: all that can run here.
        points: Number of sizes, the least first; 0: all.
        rounds: Turns of each curve, after one that warms up.
        as_json: Print JSON instead of a table.
        chart: SVG file to draw the exponents into.

    Raises:
        ConfigError: There is no such curve, or one point, which has no slope, or the chart cannot be written.
        BackendError: A chosen curve needs torch-xla, which is not installed.
    """
    check_chart(chart)
    unknown = [name for name in curves if name not in CURVES]
    if unknown:
        hint = f"known: {', '.join(CURVES)}"
        raise ConfigError([Problem("--curves", f"there is no curve {name!r}", hint=hint) for name in unknown])
    if points == 1:
        raise ConfigError([Problem("--points", "one point has no slope", hint="use 2 or more, or 0 for all")])
    traces = find_spec("torch_xla") is not None
    if WORLD in curves and not traces:
        raise BackendError(f"the curve {WORLD} needs torch-xla, which is not installed: pip install 'nxtrain[xla]'")
    names = list(curves) or [name for name in CURVES if traces or name != WORLD]
    sizes = {name: CURVES[name].sizes[: points or None] for name in names}
    result = {"machine": machine(), "rounds": rounds, **summarize(sizes, measure(sizes, rounds))}
    if chart is not None:
        bars = {f"{row['name']} ({CURVES[row['name']].exponent:g})": spread(row["rounds"]) for row in result["rows"]}
        draw(chart, bars, "nxtrain bench growth: exponent of CPU time (expected)", result["machine"])
    if as_json:
        write_document(result)
    else:
        _show(result)


def measure(sizes: Mapping[str, Sequence[int]], rounds: int) -> dict[str, list[list[float]]]:
    """CPU seconds at each size of each curve in every round."""
    workers = {}
    for name, of_curve in sizes.items():
        env = environment(1)
        if name == WORLD:
            env = trace_environment(env)
        job = json.dumps(asdict(GrowthJob(name, of_curve)))
        workers[name] = BenchWorker("nxtrain.tools.bench.growth_worker", name, job, env)
    with started(workers):
        return take_turns(workers, rounds)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) over log(size), by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    mean_x, mean_y = mean(x), mean(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def summarize(sizes: Mapping[str, Sequence[int]], measured: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Exponents inside each round, their median, and the median seconds at each size."""
    rows = []
    for name, turns in measured.items():
        exponents = [exponent(sizes[name], turn) for turn in turns]
        rows.append(
            {
                "name": name,
                "value": median(exponents),
                "unit": "exponent",
                "rounds": exponents,
                "sizes": list(sizes[name]),
                "cpu_s": [median(of_size) for of_size in zip(*turns, strict=True)],
            }
        )
    return {"rows": rows, "ratios": {}, "exponents": {row["name"]: row["value"] for row in rows}}


def _show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    table = Table(title="growth of CPU time", title_style="bold")
    for head in ("curve", "sizes", "seconds", "exponent", "linear or flat", "content"):
        table.add_column(head)
    for row in result["rows"]:
        curve = CURVES[row["name"]]
        seconds = ", ".join(f"{one:.3g}" for one in row["cpu_s"])
        sizes = ", ".join(map(str, row["sizes"]))
        table.add_row(row["name"], sizes, seconds, f"{row['value']:.2f}", f"{curve.exponent:g}", curve.text)
    table.caption = f"one thread; medians over {result['rounds']} rounds"
    console.print(table)
