"""Harness of all benchmarks: interleaved measurement of several implementations, and results as a table or JSON.

Implementations run in separate processes if they could share threads, caches or the allocator. Only one computes at a
time. A round measures each implementation once. Figures are medians over rounds. Ratios are medians of the ratios
inside each round, since the machine's speed drifts between rounds.
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
"""Timeout in seconds with which a rank of a benchmark waits for the other ranks."""


class BenchWorker:
    """Worker process that runs one implementation and returns one measurement for each request.

    Args:
        program: Module of `nxtrain.tools.bench`. Its function `turns(name, job)` makes the measurement functions, keyed
            by request.
        name: Name of the implementation, the first argument of `turns`.
        job: Workload as JSON types, the second argument of `turns`.
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
        """Run one measurement in the worker process and return its result.

        Raises:
            BackendError: The process has ended. Its output has the reason.
        """
        self.begin(request)
        return self.end()

    def begin(self, request: str = "") -> None:
        """Start one measurement, without waiting for its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `end` reports it

    def end(self) -> Any:
        """Wait for the running measurement and return its result."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise BackendError(
                f"the benchmark process of {self._name} ended with exit code {code}; its output above has the reason"
            )
        return json.loads(answer)


def serve(program: str, name: str, job: str) -> None:
    """Run one measurement for each line on standard input, and print its result as JSON, until the input ends.

    Standard output has the results only. Output of libraries goes to standard error.
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
    """Start the worker processes of all ranks, in one or several independent worlds.

    The processes end when `stack` closes.

    Args:
        world: Number of ranks in each world.
        copies: Number of independent worlds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # One thread per rank: with more threads, a rank would run faster while others wait, and ranks would be unequal.
    common = {**environment(1, job.get("backend", "cpu")), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    workers = []
    for _ in range(copies):
        for rank in range(world):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(stack.enter_context(BenchWorker(program, name, job, env)))
    return workers


def measure_concurrently(workers: Sequence[BenchWorker], request: str = "") -> list[Any]:
    """Run one measurement in several worker processes at the same time, and return all results."""
    for worker in workers:
        worker.begin(request)
    return [worker.end() for worker in workers]


def take_turns(
    sides: Mapping[str, Callable[[], Turn]], rounds: int, *, warm_up: int = 1, label: str = ""
) -> dict[str, list[Turn]]:
    """Measure each implementation once per round, after warm-up rounds whose measurements are dropped."""
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
    """Environment variables of a worker process with `threads` CPU threads and without library messages.

    On a CPU, torch's profiler would print that it finds no GPU. torch-xla, which transformers imports, would print its
    choice of a device. On GPUs, torch would warn about point-to-point transfers of a pipeline.
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
    """Row of one implementation in the JSON result: the median over rounds, and the value of each round."""
    return {"name": name, "value": median(rounds), "unit": unit, "rounds": list(rounds), **more}


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of `over[i] / under[i]`."""
    return median(a / b for a, b in zip(over, under, strict=True))


def refuse_unknown(option: str, noun: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Raise a ConfigError if a name is not one of the option's choices."""
    hint = f"known: {', '.join(choices)}"
    problems = [Problem(option, f"there is no {noun} {name!r}", hint=hint) for name in names if name not in choices]
    if problems:
        raise ConfigError(problems)


def present(
    result: Mapping[str, Any], shown: Callable[[], Sequence[str | Table]], *, as_json: bool, of_machine: bool = True
) -> None:
    """Print a benchmark's result as JSON, or the machine and the result as lines and tables."""
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
    """Build a table of benchmark results.

    The first column and the columns in `left` hold text. All other columns hold numbers and are right-aligned.
    """
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
"""CPU instruction sets that determine the speed of matrix products, as named in /proc/cpuinfo."""


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Description of this machine: CPU model, instruction sets, cores and load."""
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
