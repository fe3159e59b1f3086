"""Predictions of `nxtrain plan` next to measurements: memory of ranks, and figures that others published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from nxtrain.common.dimensions import Dimensions, MoeShape
from nxtrain.common.family import family_names, find_family
from nxtrain.common.machines import GB, GIGABIT, Machine
from nxtrain.config.load import Loaded
from nxtrain.config.schema import RunConfig
from nxtrain.plan.hardware import find_machine
from nxtrain.plan.job import Job
from nxtrain.plan.presets import SHAPES
from nxtrain.plan.speed import step_time

CONFIGS = Path(__file__).parents[2] / "configs"


def world_of(loaded: Loaded) -> int:
    """Ranks of a configuration's cluster: one per device of its instances, or as many as its degrees need."""
    cluster, parallel = loaded.config.cluster, loaded.config.parallel
    if cluster.instance:
        return cluster.nodes * find_machine(cluster.instance).devices
    return parallel.ranks_per_replica * max(parallel.dp, 1)


GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = GOLDEN / "published_throughput.json"
HELD_OUT = GOLDEN / "held_out_throughput.json"
"""Rows that chose no constant."""
CONTEXT = GOLDEN / "context_throughput.json"
"""Rows with context parallelism, which chose no constant."""
EXPERTS = GOLDEN / "expert_throughput.json"
"""Rows with experts, which chose no constant."""
GPT_OSS = {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)}
"""Blocks and experts of models that are not families here."""


@dataclass(frozen=True)
class Compared:
    """A published row with its prediction, both in tokens per second and device (a chip has two on trn1)."""

    row: dict[str, Any]
    job: Job
    published: float
    predicted: float
    mfu: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0


def job_of(row: dict[str, Any]) -> Job:
    machine = _machine(row)
    decoder = _decoder(row["model"])
    cp = row.get("cp", 1)
    dp = row.get("dp", machine.devices * row["nodes"] // (row["tp"] * cp * row["pp"]))
    update = row.get("update", "fp32_master")
    narrow = "bf16" if update == "bf16_stochastic" else "fp32"
    config = RunConfig.model_validate(
        {
            "parallel": {
                "tp": row["tp"],
                "pp": row["pp"],
                "dp": dp,
                "cp": cp,
                "cp_method": row.get("cp_method", "auto"),
                "ep": row.get("ep", 1),
                "virtual_pp": row.get("virtual_pp", 1),
                "shard": row["shard"],
                "sequence_parallel": row.get("sequence_parallel", row["tp"] > 1),
            },
            "train": {
                "seq_len": row["seq_len"],
                "global_batch": row["global_batch"],
                "micro_batch": row.get("micro_batch", 1),
                "remat": row["remat"],
                "loss_chunk_mib": row.get("loss_chunk_mib", 0),
            },
            "precision": {
                "params": "bf16",
                "update": update,
                "accumulate": narrow,
                "reduce": narrow,
                "state": narrow,
            },
            "compile": {"torch_compile": row.get("compiled", False)},
        }
    )
    finetune = config.finetune.model_copy(update=row.get("finetune", {}))
    return Job(decoder, machine, row["nodes"], config.model_copy(update={"finetune": finetune}))


def _machine(row: dict[str, Any]) -> Machine:
    """Instance of a row, with what the publication says of its own machines."""
    units = {"network_gbps": ("network_bytes_s", GIGABIT), "device_tflops": ("device_flops", 1e12)}
    units["memory_gb_s"] = ("memory_bytes_s", GB)
    own = {field: row[key] * unit for key, (field, unit) in units.items() if key in row}
    return replace(find_machine(row["instance"]), **own)


def as_its_instance(row: dict[str, Any]) -> dict[str, Any]:
    """The row on the instance that it names, as a plan without a file of machines sees it."""
    return {key: value for key, value in row.items() if key not in ("network_gbps", "device_tflops", "memory_gb_s")}


def _decoder(name: str) -> Dimensions:
    if name in SHAPES:
        return SHAPES[name].dimensions
    if name in (own := _own_models()):
        return own[name]
    if name in GPT_OSS:
        num_layers, num_experts = GPT_OSS[name]
        return Dimensions(
            vocab_size=201_088,
            hidden_size=2880,
            num_layers=num_layers,
            num_heads=64,
            num_kv_heads=8,
            head_size=64,
            intermediate_size=2880,
            mixture=MoeShape(num_experts, experts_per_token=4, expert_size=2880),
        )
    for family in map(find_family, family_names()):
        if name in family.presets:
            return family.dimensions(family.preset(name))
    raise KeyError(name)


@cache
def _own_models() -> dict[str, Dimensions]:
    models = json.loads(HELD_OUT.read_text(encoding="utf-8"))["models"]
    return {name: Dimensions(**dimensions) for name, dimensions in models.items()}


@cache
def compared() -> tuple[Compared, ...]:
    """All rows of the golden file, of which some chose the constants."""
    return _compared(PUBLISHED)


@cache
def held_out() -> tuple[Compared, ...]:
    return _compared(HELD_OUT)


@cache
def with_context() -> tuple[Compared, ...]:
    """All rows with context parallelism."""
    return _compared(CONTEXT)


@cache
def with_experts() -> tuple[Compared, ...]:
    """All rows with experts."""
    return _compared(EXPERTS)


def _compared(path: Path) -> tuple[Compared, ...]:
    return tuple(map(compare, json.loads(path.read_text(encoding="utf-8"))["rows"]))


def compare(row: dict[str, Any], *, fused_context: bool = True) -> Compared:
    """A row with its prediction; other libraries have fused kernels between context parallel ranks."""
    job, seq_len = job_of(row), row["seq_len"]
    time = step_time(job, hides_tp=row.get("hides_tp", True), fused_context=fused_context)
    if "sequences_per_s" in row:
        published = row["sequences_per_s"] * seq_len / job.world
    elif "flops_per_s_device" in row:
        published = row["flops_per_s_device"] / job.dimensions.flops_per_token(seq_len)
    else:
        published = row["tokens_per_s_device"]
    return Compared(row, job, published, job.tokens_per_step / time.step_s / job.world, time.mfu)


def summary(rows: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """Distribution of errors: of all rows, of those added after the constants, and by chip."""
    yield _distribution("all", rows)
    yield _distribution("added after the constants", [result for result in rows if "added" in result.row])
    for kind in dict.fromkeys(result.job.machine.kind for result in rows):
        yield _distribution(kind, [result for result in rows if result.job.machine.kind == kind])


def _distribution(name: str, rows: Sequence[Compared]) -> tuple[str, ...]:
    errors = [result.error for result in rows]
    within = sum(abs(error) <= 0.25 for error in errors)
    middle = median(map(abs, errors))
    return name, str(len(errors)), f"{middle:.1%}", str(within), f"{min(errors):+.1%}", f"{max(errors):+.1%}"
