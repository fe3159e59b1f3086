"""Memory and time to make one rank's part of a model that no process could hold whole.

The work runs in a process of its own, so that its peak of resident memory is that of this work and of what it imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.family import find_family
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import ParallelConfig
from nxtrain.config.stages import stages

FAMILY = "llama"
SEQ_LEN = 2048
"""Tokens of the rotary tables, the only thing here that depends on them."""
SHARE, SLACK_BYTES = 1.3, 1 << 30
"""The bound: so many times the shard, and on top what the interpreter and torch take."""


@dataclass(frozen=True)
class BuildTarget:
    """Rank of one pipeline stage whose part of the model is materialized.

    Args:
        preset: Model.
        tp, pp: Degrees.
        stage: Pipeline stage, 0 <= stage < pp.
    """

    preset: str
    tp: int
    pp: int
    stage: int

    @property
    def rank(self) -> int:
        """A rank in the middle of the stage, of a world of one model copy."""
        return self.stage * self.tp + self.tp // 2


def bench_materialize(*, preset: str, tp: int, pp: int, stage: int | None, as_json: bool) -> None:
    """Measure and print.

    Args:
        preset: Model.
        tp, pp: Degrees.
        stage: Pipeline stage; None: a middle one.
        as_json: Print JSON instead of a table.

    Raises:
        ConfigError: No such preset, or degrees that it cannot have.
        BackendError: The peak exceeds the bound, or this system does not tell it.
    """
    if stage is None:
        stage = pp // 2
    target = BuildTarget(preset, tp, pp, stage)
    _check(target)
    result = judge({**asdict(target), "rank": target.rank, **_measure(target)})
    if as_json:
        write_document(result)
    else:
        Console().print(_table(result))
    if not result["within"]:
        raise BackendError(
            f"the peak of {result['peak_bytes']:,} bytes exceeds {result['bound_bytes']:,}, "
            f"{SHARE} times the shard and {SLACK_BYTES >> 30} GiB: more than the shard was held at once"
        )


def judge(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Add the bound, and whether the peak is within it.

    Raises:
        BackendError: The system does not tell the peak.
    """
    if not measured["peak_bytes"]:
        raise BackendError("bench materialize reads the peak of resident memory from Linux's /proc, which is not here")
    bound = int(SHARE * measured["shard_bytes"]) + SLACK_BYTES
    return {**measured, "bound_bytes": bound, "within": measured["peak_bytes"] <= bound}


def _check(target: BuildTarget) -> None:
    family = find_family(FAMILY)
    model = family.preset(target.preset)
    problems = [
        *family.check(model, tp=target.tp, seq_len=SEQ_LEN),
        *stages(ParallelConfig(pp=target.pp), model.num_hidden_layers),
    ]
    if problems:
        raise ConfigError(problems)
    if target.stage >= target.pp:
        raise ConfigError(f"--stage {target.stage} is none of the {target.pp} stages; use 0 to {target.pp - 1}")


def _measure(target: BuildTarget) -> dict[str, Any]:
    argv = [sys.executable, "-m", "nxtrain.tools.bench.stage", json.dumps(asdict(target))]
    with Progress("making the shard"):
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BackendError(f"the process that was measured ended with exit code {done.returncode}; see its lines above")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _table(result: Mapping[str, Any]) -> Table:
    first, last = result["blocks"]
    table = Table(
        title=f"{result['preset']}, {result['num_params']:,} parameters, tp {result['tp']} x pp {result['pp']}",
        title_style="bold",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row(f"shard of rank {result['rank']}: stage {result['stage']}, blocks {first} to {last}", "")
    table.add_row("  parameters", f"{result['shard_params']:,}")
    for name in ("shard", "before", "peak", "bound"):
        table.add_row(f"  {_LABELS[name]}", f"{result[f'{name}_bytes'] / (1 << 20):,.0f} MiB")
    table.add_row("build without storage", f"{result['meta_s']:.2f} s")
    table.add_row("draw the weights", f"{result['fill_s']:.2f} s")
    table.caption = "the peak is within the bound" if result["within"] else "the peak exceeds the bound"
    return table


_LABELS = {
    "shard": "bytes in bf16",
    "before": "resident before it is built",
    "peak": "peak resident",
    "bound": f"bound, {SHARE} x shard + {SLACK_BYTES >> 30} GiB",
}
