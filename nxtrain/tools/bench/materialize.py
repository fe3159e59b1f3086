"""Benchmark of the memory and time to materialize one rank's shard of a model too large for one process.

The shard is made in a separate process. So the peak of resident memory comes only from making the shard, and from
imports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from nxtrain.backends import open_backend
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.progress import Progress
from nxtrain.common.sharding import ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.schema import ParallelConfig, RunConfig
from nxtrain.config.stages import stages
from nxtrain.nn.init import draw
from nxtrain.tools.bench import harness
from nxtrain.train.build import build_meta, fill_model, parts_of

FAMILY = "llama"
SEQ_LEN = 2048  # sequence length, which only the rotary tables depend on here
SHARE, SLACK_BYTES = 1.3, 1 << 30
"""Bound of peak memory: a multiple of the shard's bytes, plus the bytes of the interpreter and torch."""


@dataclass(frozen=True)
class BuildTarget:
    """Model, parallel degrees and pipeline stage of the rank whose shard is materialized."""

    preset: str
    tp: int
    pp: int
    stage: int  # pipeline stage, 0 <= stage < pp

    @property
    def rank(self) -> int:
        """Rank in the middle of the stage's tensor parallel group, in a world that holds one copy of the model."""
        return self.stage * self.tp + self.tp // 2


def bench_materialize(*, preset: str, tp: int, pp: int, stage: int | None, as_json: bool) -> None:
    """Measure the memory and time to materialize a rank's shard, and print the results.

    Args:
        stage: Pipeline stage of the rank; None: the middle stage.

    Raises:
        BackendError: The peak of memory exceeds the bound.
    """
    if stage is None:
        stage = pp // 2
    target = BuildTarget(preset, tp, pp, stage)
    family = find_family(FAMILY)
    model = family.preset(preset)
    problems = [
        *family.check(model, tp=tp, seq_len=SEQ_LEN),
        *stages(ParallelConfig(pp=pp), model.num_hidden_layers),
    ]
    if problems:
        raise ConfigError(problems)
    if stage >= pp:
        raise ConfigError(f"--stage {stage} is not a stage of --pp {pp}; use 0 to {pp - 1}")
    with (
        Progress("making the shard"),
        harness.BenchWorker("materialize", f"stage {stage}", asdict(target), os.environ) as worker,
    ):
        result = judge({**asdict(target), "rank": target.rank, **worker.turn()})
    harness.present(result, lambda: [_table(result)], as_json=as_json, of_machine=False)
    if not result["within"]:
        raise BackendError(
            f"the peak of {result['peak_bytes']:,} bytes exceeds {result['bound_bytes']:,}, "
            f"{SHARE} times the shard and {SLACK_BYTES >> 30} GiB, so more than the shard was in memory at once"
        )


def judge(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Add the bound of peak memory to a measurement, and `within`: True if the peak does not exceed the bound."""
    if not measured["peak_bytes"]:
        raise BackendError("bench materialize needs Linux's /proc for the peak of resident memory; run it on Linux")
    bound = int(SHARE * measured["shard_bytes"]) + SLACK_BYTES
    return {**measured, "bound_bytes": bound, "within": measured["peak_bytes"] <= bound}


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Make the function that materializes the shard and measures it, in a worker process."""
    return {"": lambda: make_shard(BuildTarget(**job))}


def make_shard(target: BuildTarget) -> dict[str, Any]:
    """Materialize a rank's shard as a training run does, and measure its memory and time.

    The mesh is pure data, so no other rank is needed.
    """
    tables = {
        "parallel": {"tp": target.tp, "pp": target.pp},
        "train": {"seq_len": SEQ_LEN},
        "precision": {"params": "bf16", "update": "fp32_master"},
    }
    family = find_family(FAMILY)
    plan = Resolved(RunConfig.model_validate(tables), family, family.preset(target.preset))
    backend = open_backend("cpu")
    mesh = Mesh.build(target.tp * target.pp, target.rank, tp=target.tp, pp=target.pp)
    before_bytes = backend.diagnostics.peak_memory_bytes()
    start = time.perf_counter()
    model = build_meta(plan, backend, mesh)
    (part,) = parts_of(plan, mesh)
    built = time.perf_counter()
    fill_model(plan, model, backend, mesh, draw(ParamTable.of(model), mesh.tp, plan.config.run.seed))
    filled = time.perf_counter()
    return {
        "blocks": [part.blocks[0], part.blocks[-1]],
        "num_params": plan.dimensions.num_params,
        "shard_params": sum(parameter.numel() for parameter in model.parameters()),
        "shard_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "before_bytes": before_bytes,
        "peak_bytes": backend.diagnostics.peak_memory_bytes(),
        "meta_s": built - start,
        "fill_s": filled - built,
    }


def _table(result: Mapping[str, Any]) -> Table:
    first, last = result["blocks"]
    sizes = {
        "bytes in bf16": result["shard_bytes"],
        "resident before it is built": result["before_bytes"],
        "peak resident": result["peak_bytes"],
        f"bound, {SHARE} x shard + {SLACK_BYTES >> 30} GiB": result["bound_bytes"],
    }
    rows = [(f"shard of rank {result['rank']}: stage {result['stage']}, blocks {first} to {last}", "")]
    rows.append(("  parameters", f"{result['shard_params']:,}"))
    rows += [(f"  {name}", f"{num_bytes / (1 << 20):,.0f} MiB") for name, num_bytes in sizes.items()]
    rows.append(("build without storage", f"{result['meta_s']:.2f} s"))
    rows.append(("draw the weights", f"{result['fill_s']:.2f} s"))
    title = f"{result['preset']}, {result['num_params']:,} parameters, tp {result['tp']} x pp {result['pp']}"
    caption = "the peak is within the bound" if result["within"] else "the peak exceeds the bound"
    return harness.table(title, ("", ""), rows, caption)
