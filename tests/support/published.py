"""Published throughput of training, and the predictions for the same runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nxtrain.config.schema import RunConfig
from nxtrain.family import Decoder, find_family
from nxtrain.plan.hardware import GIGABIT, find_machine
from nxtrain.plan.job import Job
from nxtrain.plan.presets import SHAPES
from nxtrain.plan.shapes import flops_per_token
from nxtrain.plan.speed import step_time

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = GOLDEN / "published_throughput.json"
HELD_OUT = GOLDEN / "held_out_throughput.json"
"""Rows that chose no constant."""


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
    machine = find_machine(row["instance"])
    if "network_gbps" in row:
        machine = replace(machine, network_bytes_s=row["network_gbps"] * GIGABIT)
    decoder = _decoder(row["model"])
    dp = row.get("dp", machine.devices * row["nodes"] // (row["tp"] * row["pp"]))
    update = row.get("update", "fp32_master")
    narrow = "bf16" if update == "bf16_stochastic" else "fp32"
    config = RunConfig.model_validate(
        {
            "parallel": {
                "tp": row["tp"],
                "pp": row["pp"],
                "dp": dp,
                "virtual_pp": row.get("virtual_pp", 1),
                "shard": row["shard"],
                "sequence_parallel": row.get("sequence_parallel", row["tp"] > 1),
            },
            "train": {
                "seq_len": row["seq_len"],
                "global_batch": row["global_batch"],
                "micro_batch": row.get("micro_batch", 1),
                "remat": row["remat"],
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


def _decoder(name: str) -> Decoder:
    if name in SHAPES:
        return SHAPES[name].decoder
    if name in (own := _own_models()):
        return own[name]
    family = find_family("llama")
    return family.decoder(family.preset(name))


@cache
def _own_models() -> dict[str, Decoder]:
    models = json.loads(HELD_OUT.read_text(encoding="utf-8"))["models"]
    return {name: Decoder(**dimensions) for name, dimensions in models.items()}


@cache
def compared() -> tuple[Compared, ...]:
    """All rows of the golden file, of which some chose the constants."""
    return _compared(PUBLISHED)


@cache
def held_out() -> tuple[Compared, ...]:
    """All rows that chose no constant."""
    return _compared(HELD_OUT)


def _compared(path: Path) -> tuple[Compared, ...]:
    found = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        job = job_of(row)
        time = step_time(job, hides_tp=row.get("hides_tp", True))
        seq_len = row["seq_len"]
        if "sequences_per_s" in row:
            published = row["sequences_per_s"] * seq_len / job.world
        elif "flops_per_s_device" in row:
            published = row["flops_per_s_device"] / flops_per_token(job.decoder, seq_len)
        else:
            published = row["tokens_per_s_device"]
        found.append(Compared(row, job, published, job.tokens_per_step / time.step_s / job.world, time.mfu))
    return tuple(found)
