"""Host cost of PyTorch/XLA: time to record, hash and launch nxtrain's and transformers' steps, and to trace a rank.

The model is narrow, so its computation takes almost no time, and deep, since the cost grows with the operations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.backends.xla.environment import trace_environment
from nxtrain.common.errors import BackendError
from nxtrain.common.process.document import write_document
from nxtrain.tools.bench.train import OURS, PEER
from nxtrain.tools.bench.turns import BenchWorker, environment, started, take_turns

TRACE = "trace"
WORLD, TP = 4096, 8
"""The world that a rank is traced in."""


@dataclass(frozen=True)
class LazyWorkload:
    """Workload that every implementation records.

    Args:
        layers: Number of blocks.
        micro_batches: Number per step.
        steps: Number per turn.
        seq_len: Tokens per sequence; each micro-batch is one.
    """

    layers: int
    micro_batches: int
    steps: int
    seq_len: int = 32

    @property
    def shape(self) -> dict[str, Any]:
        """The model, under Hugging Face's names."""
        return {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": self.seq_len,
        }


def bench_xla(*, layers: int, micro_batches: int, rounds: int, steps: int, as_json: bool) -> None:
    """Measure and print.

    Args:
        layers: Blocks of the model.
        micro_batches: Per step.
        rounds: Turns of each implementation, after one that compiles.
        steps: Per turn.
        as_json: Print JSON instead of a table.

    Raises:
        BackendError: torch-xla or transformers is not installed.
    """
    for package in ("torch_xla", "transformers"):
        if find_spec(package) is None:
            raise BackendError(
                f"bench xla needs {package}, which is not installed: pip install 'nxtrain[xla]' transformers"
            )
    work = LazyWorkload(layers, micro_batches, steps)
    env, job = trace_environment(environment(1)), json.dumps(asdict(work))
    with started(
        {name: BenchWorker("nxtrain.tools.bench.lazy", name, job, env) for name in (OURS, PEER, TRACE)}
    ) as workers:
        result = summarize(take_turns(workers, rounds))
    if as_json:
        write_document({**asdict(work), "rounds": rounds, **result})
    else:
        Console().print(_table(result, work))


def summarize(measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians over rounds.

    Args:
        measured: Seconds per step of both implementations, and seconds to trace a rank.
    """
    ratios = [peer / ours for ours, peer in zip(measured[OURS], measured[PEER], strict=True)]
    return {
        **{name: {"host_ms_per_step": 1e3 * median(measured[name])} for name in (OURS, PEER)},
        "ratio": median(ratios),
        "ratios": ratios,
        "trace_s_per_rank": median(measured[TRACE]),
    }


def _table(result: Mapping[str, Any], work: LazyWorkload) -> Table:
    title = f"{work.layers} layers, {work.micro_batches} micro-batches per step"
    table = Table(title=title, title_style="bold")
    table.add_column("")
    table.add_column("host ms per step", justify="right")
    for name in (OURS, PEER):
        table.add_row(name, f"{result[name]['host_ms_per_step']:.1f}")
    table.caption = (
        f"transformers takes {result['ratio']:.2f} x as long; one rank of {WORLD} is traced in "
        f"{result['trace_s_per_rank']:.2f} s; medians over {len(result['ratios'])} rounds"
    )
    return table
