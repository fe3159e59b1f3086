"""Harness of all benchmarks: sides run in turns, and a table or JSON shows the results.

Sides that could profit from the threads, caches or allocator of another run in processes of their own. One
works while the others wait. A round runs each side once. Figures are medians over rounds, and ratios are
medians of the ratios inside each round, since the machine's speed drifts between rounds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import ON_GPUS
from nxtrain.launch.environment import QUIET_PROFILER
from nxtrain.launch.gpu import QUIET_TRANSFERS
from nxtrain.launch.threads import num_cores

Turn = TypeVar("Turn")

PATIENCE_S = 600.0
"""Seconds that a rank of a benchmark waits for the others."""


class BenchWorker:
    """Process that runs one side for one turn on each request, by `serve`.

    Args:
        program: Module of `nxtrain.tools.bench`. Its function `turns(name, job)` makes the turns of the side, by the
            line that requests each.
        job: Workload, of types that JSON has.
    """

    def __init__(self, program: str, name: str, job: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._name = name
        argv = [sys.executable, "-m", "nxtrain.tools.bench.harness", program, name, json.dumps(job)]
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes

    def turn(self, request: str = "") -> Any:
        """Run one turn and return its measurement; a BackendError if the process ended, whose output has the reason."""
        self.begin(request)
        return self.end()

    def begin(self, request: str = "") -> None:
        """Start one turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `end` reports it

    def end(self) -> Any:
        """Wait for the end of the turn and return the measurement."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise BackendError(
                f"the benchmark process of {self._name} ended with exit code {code}; see its lines above"
            )
        return json.loads(answer)


def serve(program: str, name: str, job: str) -> None:
    """Run one turn for each line on standard input, and print the measurement as JSON, until standard input ends.

    Standard output has the measurements only. Output of libraries goes to standard error.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        turns = import_module(f"nxtrain.tools.bench.{program}").turns(name, json.loads(job))
        for line in sys.stdin:
            print(json.dumps(turns[line.strip()]()), file=answers, flush=True)


def start_ranks(
    stack: ExitStack, program: str, name: str, job: Mapping[str, Any], world: int = 1, copies: int = 1
) -> list[BenchWorker]:
    """Start the ranks of one or several independent worlds; the ranks end with the stack."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # More threads than one would make a rank faster while others wait, and ranks unequal.
    common = {**environment(1, job.get("backend", "cpu")), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    workers = []
    for _ in range(copies):
        for rank in range(world):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(stack.enter_context(BenchWorker(program, name, job, env)))
    return workers


def turn_at_once(workers: Sequence[BenchWorker], request: str = "") -> list[Any]:
    """Run one turn of several processes at the same time, and return the measurement of each."""
    for worker in workers:
        worker.begin(request)
    return [worker.end() for worker in workers]


def take_turns(
    sides: Mapping[str, Callable[[], Turn]], rounds: int, *, warm_up: int = 1, label: str = ""
) -> dict[str, list[Turn]]:
    """Run each side once in every round, after rounds that warm up, whose measurements are dropped."""
    measured: dict[str, list[Turn]] = {name: [] for name in sides}
    done = 0
    with Progress("starting", (warm_up + rounds) * len(sides)) as progress:
        for number in range(1 - warm_up, rounds + 1):
            for name, turn in sides.items():
                progress.show(done, f"{label}round {max(0, number)} of {rounds}: {name}")
                measured[name].append(turn())
                done += 1
    return {name: turns[warm_up:] for name, turns in measured.items()}


def environment(threads: int, backend: str = "cpu") -> dict[str, str]:
    """Environment of a worker with a number of threads, in which libraries print nothing of their own.

    On a CPU, torch's profiler would print that it finds no GPU. torch-xla, which transformers imports, would print its
    choice. On GPUs, torch would warn of transfers of a pipeline.
    """
    quiet = {}
    if backend == "cpu":
        quiet = {QUIET_PROFILER.name: QUIET_PROFILER.value, "PJRT_DEVICE": "CPU"}
    if backend == ON_GPUS:
        quiet = {QUIET_TRANSFERS.name: QUIET_TRANSFERS.value}
    return {**quiet, **os.environ, "OMP_NUM_THREADS": str(threads)}


def cpu_s(act: Callable[[], object]) -> float:
    """CPU seconds of this process in one call of a function."""
    began = time.process_time()
    act()
    return time.process_time() - began


def row(name: str, unit: str, rounds: Sequence[float], **more: Any) -> dict[str, Any]:
    """Row of a side for `--json`: the median over rounds, and each round."""
    return {"name": name, "value": median(rounds), "unit": unit, "rounds": list(rounds), **more}


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of the ratios inside each round."""
    return median(a / b for a, b in zip(over, under, strict=True))


def refuse_unknown(option: str, noun: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Refuse names that an option does not have, by a ConfigError."""
    hint = f"known: {', '.join(choices)}"
    problems = [Problem(option, f"there is no {noun} {name!r}", hint=hint) for name in names if name not in choices]
    if problems:
        raise ConfigError(problems)


def present(
    result: Mapping[str, Any], shown: Callable[[], Sequence[str | Table]], *, as_json: bool, of_machine: bool = True
) -> None:
    """Print the machine and a result, as JSON, or as lines and tables for the terminal."""
    if as_json:
        write_document(result)
        return
    console = Console(highlight=False, soft_wrap=True)
    if of_machine:
        cpu = result["machine"]
        instructions = ", ".join(cpu["instructions"]) or "unknown instruction sets"
        console.print(f"{cpu['cpu']}, {cpu['cores']} cores, {instructions}, load {cpu['load'][0]:.1f}", markup=False)
    if result.get("devices"):
        console.print(result["devices"], markup=False)
    for part in shown():
        console.print(part, markup=not isinstance(part, str))


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", left: Collection[str] = ()
) -> Table:
    """Table of figures: the first column and those named `left` hold words, the others numbers."""
    drawn = Table(title=title, title_style="bold", caption=caption or None)
    for number, head in enumerate(heads):
        if number == 0 or head in left:
            drawn.add_column(head, overflow="fold")
        else:
            drawn.add_column(head, justify="right")
    for cells in rows:
        drawn.add_row(*cells)
    return drawn


INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
"""Instruction sets that decide about the speed of matrix products, as /proc/cpuinfo names them."""


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """CPU of this machine, its instruction sets, cores and load."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", fields.get("CPU part", "unknown CPU")),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": num_cores(),
        "load": list(os.getloadavg()),
    }


if __name__ == "__main__":
    serve(*sys.argv[1:])
