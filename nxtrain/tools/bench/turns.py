"""Processes of a benchmark: each implementation in one of its own, one at work while the others wait.

So no implementation profits from another's allocator or threads. A round runs each once. Figures are medians over
rounds, and ratios are medians of the ratios inside each round, since the machine's speed drifts between rounds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from nxtrain.common.errors import BackendError
from nxtrain.common.process.progress import Progress
from nxtrain.launch.environment import QUIET_PROFILER


class BenchWorker:
    """Process that runs one implementation for one turn on each request.

    Args:
        module: Module that the process runs, with two arguments.
        name: Which implementation.
        work: Workload as JSON.
        env: Its environment.
    """

    def __init__(self, module: str, name: str, work: str, env: Mapping[str, str]) -> None:
        self._name = name
        argv = [sys.executable, "-m", module, name, work]
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def turn(self, request: str = "") -> Any:
        """Run one turn and return the measurement, as JSON has it.

        Raises:
            BackendError: The process ended; its output contains the reason.
        """
        self.begin(request)
        return json.loads(self.end())

    def begin(self, request: str = "") -> None:
        """Let one turn begin."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `end` reports it

    def end(self) -> str:
        """Wait for the turn and return its line.

        Raises:
            BackendError: The process ended; its output contains the reason.
        """
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise BackendError(
                f"the benchmark process of {self._name} ended with exit code {code}; see its lines above"
            )
        return answer


def take_turns(workers: Mapping[str, BenchWorker], rounds: int) -> dict[str, list[Any]]:
    """Measure each worker in each round, after one round of warm-up, which is not in the result."""
    return {name: turns[1:] for name, turns in take_all_turns(workers, rounds).items()}


def take_all_turns(workers: Mapping[str, BenchWorker], rounds: int) -> dict[str, list[Any]]:
    """Measure each worker in a warm-up round and in each round; the workers run on."""
    measured: dict[str, list[Any]] = {name: [] for name in workers}
    with Progress("starting", (rounds + 1) * len(workers)) as progress:
        for done, (number, name) in enumerate(product(range(rounds + 1), workers)):
            progress.show(done, f"round {number} of {rounds}: {name}")
            measured[name].append(workers[name].turn())
    return measured


@contextmanager
def started(workers: Mapping[str, BenchWorker]) -> Iterator[Mapping[str, BenchWorker]]:
    """End the processes with the context."""
    with ExitStack() as stack:
        for worker in workers.values():
            stack.enter_context(worker)
        yield workers


def serve(make: Callable[[], Mapping[str, Callable[[], object]]]) -> None:
    """Answer the requests of standard input until its end, in a worker's process.

    Args:
        make: Makes the measurements, by request; a blank line requests "".
    """
    with own_output() as answers:
        turns = make()
        for line in sys.stdin:
            print(json.dumps(turns[line.strip()]()), file=answers, flush=True)


@contextmanager
def own_output() -> Iterator[TextIO]:
    """Standard output for answers alone: libraries that print there print to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            yield answers
        finally:
            answers.flush()
            os.dup2(answers.fileno(), 1)


def environment(threads: int, backend: str = "cpu") -> dict[str, str]:
    """Environment of a worker with so many threads; on a CPU, libraries print nothing about other devices.

    Torch's profiler would print that it finds no GPU. torch-xla, which transformers imports, would print its choice.
    """
    quiet = {}
    if backend == "cpu":
        quiet = {QUIET_PROFILER.name: QUIET_PROFILER.value, "PJRT_DEVICE": "CPU"}
    return {**quiet, **os.environ, "OMP_NUM_THREADS": str(threads)}


def rank_environments(world: int) -> list[dict[str, str]]:
    """Environment of each rank of local processes with one thread each.

    More threads would make a rank faster while others wait, and ranks unequal.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**environment(1), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of the ratios inside each round."""
    return median(a / b for a, b in zip(over, under, strict=True))


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
"""Instruction sets that decide about the speed of matrix products, as /proc/cpuinfo names them."""


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """CPU, its instruction sets, cores and load."""
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


def machine_line(described: Mapping[str, Any]) -> str:
    """The machine in one line for people."""
    instructions = ", ".join(described["instructions"]) or "unknown instruction sets"
    return f"{described['cpu']}, {described['cores']} cores, {instructions}, load {described['load'][0]:.1f}"
