"""Time from a command to its first effect, next to `import torch`, in turns and in fresh processes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.tools.bench.turns import machine, machine_line, median_ratio

PYTHON = "python"
TORCH = "import torch"
PACKAGE = "import nxtrain"
HELP = "nxtrain --help"
FIRST_STEP = "first step"

CODE = {PYTHON: "pass", TORCH: "import torch", PACKAGE: "import nxtrain"}

LIMIT_S = 600.0


def bench_startup(*, config: Path | None, rounds: int, as_json: bool) -> None:
    """Measure and print.

    Args:
        config: Configuration whose first step is measured; None: no step.
        rounds: Turns of each, after one that warms the page cache.
        as_json: Print JSON instead of a table.

    Raises:
        ConfigError: There is no such configuration.
        BackendError: A command failed; its output contains the reason.
    """
    if config is not None and not config.is_file():
        raise ConfigError([Problem("--first-step", f"there is no file {config}", hint="give the path of a TOML file")])
    result = {"machine": machine(), "rounds": rounds, **summarize(measure(config, rounds))}
    if as_json:
        write_document(result)
    else:
        _show(result)


def measure(config: Path | None, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Wall and CPU seconds of each command in every round; the CPU time of children counts."""
    acts = {name: partial(command, name) for name in (PYTHON, TORCH, PACKAGE, HELP)}
    if config is not None:
        acts[FIRST_STEP] = partial(first_step, config)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in acts}
    with Progress("starting", (rounds + 1) * len(acts)) as progress:
        for done, (number, name) in enumerate(product(range(rounds + 1), acts)):
            progress.show(done, f"round {number} of {rounds}: {name}")
            seconds[name].append(acts[name]())
    return {name: turns[1:] for name, turns in seconds.items()}


def command(name: str) -> dict[str, float]:
    """Seconds of a process by clock."""
    argv = ["-m", "nxtrain", "--help"]
    if name in CODE:
        argv = ["-c", CODE[name]]
    cpu, began = _children_s(), time.perf_counter()
    done = subprocess.run([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    seconds = {"wall": time.perf_counter() - began, "cpu": _children_s() - cpu}
    _check(name, done.returncode, done.stdout)
    return seconds


def first_step(config: Path) -> dict[str, float]:
    """Wall seconds until a run of one step has recorded its loss, and CPU seconds of the whole run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        metrics, output = folder / "metrics.jsonl", Path(scratch) / "output"
        options = [
            "train.steps=1",
            "optim.warmup_steps=0",
            "metrics.log_every=1",
            "train.eval_every=0",
            f"run.dir={json.dumps(str(folder))}",
        ]
        argv = [sys.executable, "-m", "nxtrain", "train", str(config), *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        cpu, began = _children_s(), time.perf_counter()
        with output.open("wb") as log, subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT) as run:
            try:
                wall = _recorded_s(run, metrics, began)
                code = run.wait(LIMIT_S)
            finally:
                run.kill()
        _check(FIRST_STEP, code, output.read_bytes())
        if wall is None:
            raise BackendError(f"a run of {config} recorded no step; see its [metrics]")
        return {"wall": wall, "cpu": _children_s() - cpu}


def _recorded_s(run: subprocess.Popen[bytes], metrics: Path, began: float) -> float | None:
    """Seconds until the first whole line of the metrics; None: the run ended without."""
    while time.perf_counter() - began < LIMIT_S:
        ended = run.poll() is not None
        if metrics.is_file() and b"\n" in metrics.read_bytes():
            return time.perf_counter() - began
        if ended:
            break
        time.sleep(0.01)
    return None


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _check(name: str, code: int, output: bytes) -> None:
    if code:
        tail = output.decode(errors="replace").strip().splitlines()[-5:]
        raise BackendError("\n".join([f"{name} ended with exit code {code}; its last lines:", *tail]))


def summarize(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over rounds, and ratios of CPU time over `import torch` inside each round.

    Args:
        measured: Seconds by clock of each command in every round.
    """
    cpu = {}
    rows = []
    for name, turns in measured.items():
        wall = [turn["wall"] for turn in turns]
        cpu[name] = [turn["cpu"] for turn in turns]
        rows.append(
            {
                "name": name,
                "value": median(wall),
                "unit": "s",
                "rounds": wall,
                "cpu_s": {"value": median(cpu[name]), "rounds": cpu[name]},
            }
        )
    return {"rows": rows, "ratios": {name: median_ratio(cpu[name], cpu[TORCH]) for name in cpu if name != TORCH}}


def _show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    table = Table(title="start-up, seconds", title_style="bold")
    table.add_column("")
    for head in ("wall", "CPU", "CPU over import torch"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        ratio = f"{result['ratios'][row['name']]:.2f}" if row["name"] in result["ratios"] else ""
        table.add_row(row["name"], f"{row['value']:.2f}", f"{row['cpu_s']['value']:.2f}", ratio)
    has_step = any(row["name"] == FIRST_STEP for row in result["rows"])
    note = "--first-step CONFIG adds the first step of a run"
    if has_step:
        note = "the first step's wall time ends with its record, its CPU time with the run"
    table.caption = f"medians over {result['rounds']} rounds; {note}"
    console.print(table)
