"""Training speed of one process, ours and transformers' in turn, and of the matrix products that bound both.

Each implementation lives in a process of its own, so that neither profits from the other's allocator or threads; one
works while the others wait. A round runs each once. What is quoted is the median over rounds, and of ratios the median
of the ratios inside each round, since the machine's speed drifts between rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.errors import BackendError
from nxtrain.family import find_family

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""A Llama of 56 million parameters."""

OURS, PEER, PEAK = "nxtrain", "transformers", "gemm"


@dataclass(frozen=True)
class Workload:
    """Workload that every implementation computes.

    Args:
        steps: Updates per round and implementation.
        batch: Sequences per update.
        seq_len: Tokens per sequence.
        precision: Type of the weights and activations, `bf16` or `fp32`.
        shape: Model, under Hugging Face's names.
    """

    steps: int
    batch: int
    seq_len: int
    precision: str
    shape: Mapping[str, Any]


def bench_train(
    *, threads: int, rounds: int, steps: int, batch: int, seq_len: int, precision: str, as_json: bool
) -> None:
    """Measure and print.

    Args:
        threads: Per process; 0: all cores.
        rounds: Turns of each implementation, after one that warms up.
        steps: Updates per turn.
        batch: Sequences per update.
        seq_len: Tokens per sequence.
        precision: `bf16` or `fp32`.
        as_json: Print JSON instead of a table.

    Raises:
        BackendError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise BackendError("bench train compares with transformers, which is not installed: pip install transformers")
    work = Workload(steps, batch, seq_len, precision, {**SHAPE, "max_position_embeddings": seq_len})
    family = find_family("llama")
    flops_per_token = family.flops_per_token(family.config_type.model_validate(work.shape), seq_len)
    env, job = {**os.environ, "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)}, json.dumps(asdict(work))
    workers = {name: Worker("nxtrain.bench.worker", name, job, env) for name in (OURS, PEER, PEAK)}
    measured = take_turns(workers, rounds)
    result = summarize(measured, tokens=steps * batch * seq_len, flops_per_token=flops_per_token)
    if as_json:
        print(json.dumps({**asdict(work), "threads": threads, "rounds": rounds, **result}, indent=2))
    else:
        Console().print(_table(result))


def take_turns(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Measure each worker in each round, after one round of warm-up."""
    measured: dict[str, list[float]] = {name: [] for name in workers}
    with ExitStack() as stack, Console(stderr=True).status("starting") as status:
        for worker in workers.values():
            stack.enter_context(worker)
        for turn in range(rounds + 1):
            for name, worker in workers.items():
                status.update(f"round {turn} of {rounds}: {name}")
                seconds = worker.turn()
                if turn:
                    measured[name].append(seconds)
    return measured


def summarize(measured: Mapping[str, Sequence[float]], *, tokens: int, flops_per_token: int) -> dict[str, Any]:
    """Medians over rounds.

    Args:
        measured: Seconds of each turn of each implementation; of the peak, FLOPs per second.
        tokens: Trained on in one turn.
        flops_per_token: Of forward and backward.
    """
    rates = {name: [tokens / seconds for seconds in measured[name]] for name in (OURS, PEER)}
    peaks = measured[PEAK]

    def of(name: str) -> dict[str, float]:
        mfu = [rate * flops_per_token / peak for rate, peak in zip(rates[name], peaks, strict=True)]
        return {"tokens_per_s": median(rates[name]), "mfu": median(mfu)}

    ratios = [ours / peer for ours, peer in zip(rates[OURS], rates[PEER], strict=True)]
    return {OURS: of(OURS), PEER: of(PEER), "ratio": median(ratios), "ratios": ratios, "peak_flops": median(peaks)}


class Worker:
    """Process that runs one implementation for one turn on each request.

    Args:
        module: Module that the process runs, with two arguments.
        name: Which implementation.
        work: Workload as JSON.
        env: Its environment.
    """

    def __init__(self, module: str, name: str, work: str, env: Mapping[str, str]) -> None:
        argv = [sys.executable, "-m", module, name, work]
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def turn(self) -> float:
        """Run one turn and return what it measured.

        Raises:
            BackendError: The process ended; what it printed says why.
        """
        self.begin()
        return float(self.end())

    def begin(self) -> None:
        """Let one turn begin."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `end` tells

    def end(self) -> str:
        """Wait for the turn and return the line that it printed.

        Raises:
            BackendError: The process ended; what it printed says why.
        """
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise BackendError(f"a benchmark process ended with exit code {self._process.wait()}; see its lines above")
        return answer


def _table(result: Mapping[str, Any]) -> Table:
    table = Table(title=f"{result['ratio']:.2f} x transformers", title_style="bold")
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_column("MFU of the GEMM peak", justify="right")
    for name in (OURS, PEER):
        table.add_row(name, f"{result[name]['tokens_per_s']:.0f}", f"{result[name]['mfu']:.1%}")
    table.caption = (
        f"peak {result['peak_flops'] / 1e9:.0f} GFLOP/s, causal FLOPs; medians over {len(result['ratios'])} rounds"
    )
    return table
