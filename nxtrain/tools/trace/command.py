"""`nxtrain graphs`: report the graphs that the compiler will get, and fail if they have problems.

Tracing runs in a separate process, whose environment is set before torch-xla reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nxtrain.backends.xla.environment import support, trace_environment
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import spans
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.document import write_document
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig
from nxtrain.tools.trace.choice import TRACED, backend_of, choose, without_nxd

IRRELEVANT = (
    "data.source=stdlib",
    'data.path=""',
    "data.mixture=[]",
    "data.weights=[]",
    "data.packing=concat",
    "data.workers=2",
    "data.worker_restarts=3",
    "checkpoint.async=false",
    "compile.torch_compile=false",
    "recovery.in_job=false",
)
"""Overrides of keys that no graph depends on, so that a run can be traced before its data exists."""

UNBOUND = 1000  # width in characters of output that is not a terminal


def graphs(
    config: Path, overrides: Sequence[str], *, world: int, ranks: Sequence[int], steps: int, hlo: Path | None
) -> dict[str, Any]:
    """Trace ranks of a run in a separate process, and return the report.

    Args:
        config: Configuration file.
        world: Number of ranks of the run.
        ranks: Ranks to trace; empty: those of `some_ranks`.
        steps: Number of training steps to trace.
        hlo: Folder for the graphs' HLO texts; None: they are not written.

    Raises:
        ConfigError: The configuration cannot run in that world, or a rank is outside it.
        BackendError: torch-xla is not installed, the layer set cannot run, or the tracing process failed.
    """
    irrelevant = irrelevant_to(load(config, overrides).config)
    given = load(config, [*overrides, *irrelevant])
    resolve_config(given, world, backend_of(given.config))
    chosen = choose(given.config)
    relaxed = [*overrides, *irrelevant, *(f"{key}={value}" for key, value in TRACED.items())]
    plan = resolve_config(load(config, relaxed), world)
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        raise ConfigError(f"--rank {outside[0]} is outside the {world} ranks of --world; use 0 to {world - 1}")
    traced = list(dict.fromkeys(ranks)) or some_ranks(plan, world)
    job = {
        "config": str(config),
        "overrides": relaxed,
        "world": world,
        "ranks": traced,
        "steps": steps,
        "hlo": str(hlo or ""),
        "layers": chosen.layers,
        "instance": chosen.instance.name,
    }
    standard_error().print(
        f"tracing {len(traced)} of {world} ranks ({spans(traced)}), {steps} steps each; the imports take seconds"
    )
    report = _traced(job, min(world, chosen.instance.devices))
    lacking = report.pop("lacking")
    if lacking:
        chosen = without_nxd(chosen, given.config, lacking)
    notes = [*map(str, chosen.stand_ins), *chosen.notes]
    micro_batches = report["micro_batches"]
    num_traced, num_of_run = micro_batches["traced"], micro_batches["of_run"]
    if num_traced != num_of_run:
        notes.append(
            f"a step is traced with {num_traced} of its {num_of_run:,} micro-batches: each further one repeats a graph"
        )
    return {
        **report,
        "layers": chosen.layers,
        "attention": TRACED["backend.attention"],
        "replaced": {stand_in.key: stand_in.configured for stand_in in chosen.stand_ins},
        "notes": notes,
    }


def irrelevant_to(config: RunConfig) -> tuple[str, ...]:
    """Overrides for keys that no graph of a run depends on."""
    # Pairs need one prepared corpus, and a teacher needs rows; neither need be there yet.
    if config.finetune.compares or config.data.teacher:
        return tuple(line for line in IRRELEVANT if not line.startswith("data."))
    if config.data.validation_path:  # as many evaluations of other rows
        return (*IRRELEVANT, 'data.validation_path=""', "data.validation_fraction=0.1")
    return IRRELEVANT


def some_ranks(plan: Resolved, world: int) -> list[int]:
    """Choose ranks that differ in their positions: the first and last along each axis, neighbours, one in the middle.

    With several pipeline stages, the first and the last rank of each stage are added. Only ranks of the same stage can
    be compared.
    """
    tp = plan.config.parallel.tp
    cp = plan.config.parallel.cp
    pp = plan.config.parallel.pp
    stage = world // pp
    ranks = {0, 1, tp - 1, tp, tp * cp - 1, tp * cp, world // 2 + 1, world - 1}
    for first in range(0, world, stage):
        ranks |= {first, first + stage - 1}
    return sorted(rank for rank in ranks if rank < world)


def present(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the report of `nxtrain graphs`.

    Raises:
        BackendError: The graphs have problems.
    """
    if as_json:
        write_document(report)
    else:
        width = None
        if not sys.stdout.isatty():  # the reader of a file or a pipe has no width to fit
            width = UNBOUND
        console = Console(width=width, highlight=False)
        console.print(_table(report))
        scales = {graph["dp_scale"] for graph in report["graphs"]} - {None}
        factor = ", ".join(f"{scale:g} = 1/{1 / scale:g}" for scale in scales) or "no constant"
        reads = ", ".join(f"{read['file']}:{read['line']}" for read in report["host_reads"]) or "none"
        texts = [f"{graph['name']}: {graph['hlo']}" for graph in report["graphs"] if "hlo" in graph]
        first = f"factor of sums over dp: {factor}; host reads inside a step: {reads}"
        last = f"traced in {sum(report['seconds']):.1f} s, the first rank in {report['seconds'][0]:.1f} s"
        for line in (first, *report["notes"], *texts, last):
            console.print(line, markup=False)
    problems = report["problems"]
    if problems:
        raise BackendError("\n".join(["these graphs have problems:", *(f"  {line}" for line in problems)]))


def _traced(job: Mapping[str, Any], local_world: int) -> dict[str, Any]:
    installed = support()
    if not installed.ok:
        raise BackendError(f"tracing graphs needs torch-xla: {installed.reason}")
    argv = [sys.executable, "-m", "nxtrain.tools.trace.trace", json.dumps(job)]
    done = subprocess.run(
        argv, env=trace_environment(os.environ, local_world), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise BackendError(f"the tracing process ended with exit code {done.returncode}; see its output above")
    traced: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return traced


def _table(report: Mapping[str, Any]) -> Table:
    ranks = spans(report["ranks"])
    table = Table(
        title=f"{report['distinct_graphs']} graphs in {report['steps']} steps; world {report['world']}, ranks {ranks}",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("graph", "steps", "collective", "axis"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "groups", "ranks each", "MiB"):
        table.add_column(name, justify="right")
    for graph in report["graphs"]:
        steps = graph["steps"]
        span = ", ".join(map(str, steps))
        if len(steps) > 1 and len(steps) == steps[-1] - steps[0] + 1:
            span = f"{steps[0]}-{steps[-1]}"
        first = [f"{graph['name']}\n[dim]{graph['hash'][:12]}[/dim]", span]
        rows = [
            [
                row["op"],
                row["axis"] or "[bold red]none[/bold red]",
                f"{row['count']:,}",
                f"{row['num_groups']:,}",
                f"{row['group_size']:,}",
                f"{row['bytes'] / (1 << 20):,.3f}",
            ]
            for row in graph["collectives"]
        ]
        columns = ["\n".join(column) for column in zip(*rows, strict=True)] or ["no collectives"]
        table.add_row(*first, *columns, end_section=True)
    return table
