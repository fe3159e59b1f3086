"""Published throughput of training, and the predictions for the same runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nxtrain.config.schema import RunConfig
from nxtrain.family import find_family
from nxtrain.plan.hardware import find_machine
from nxtrain.plan.job import Job
from nxtrain.plan.presets import SHAPES
from nxtrain.plan.shapes import flops_per_token
from nxtrain.plan.speed import step_time

GOLDEN = Path(__file__).parents[1] / "golden" / "published_throughput.json"


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
    family = find_family("llama")
    name = row["model"]
    decoder = SHAPES[name].decoder if name in SHAPES else family.decoder(family.preset(name))
    dp = row.get("dp", machine.devices * row["nodes"] // (row["tp"] * row["pp"]))
    update = row.get("update", "fp32_master")
    narrow = "bf16" if update == "bf16_stochastic" else "fp32"
    config = RunConfig.model_validate(
        {
            "parallel": {
                "tp": row["tp"],
                "pp": row["pp"],
                "dp": dp,
                "shard": row["shard"],
                "sequence_parallel": row["tp"] > 1,
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


@cache
def compared() -> tuple[Compared, ...]:
    """All rows of the golden file."""
    found = []
    for row in json.loads(GOLDEN.read_text(encoding="utf-8"))["rows"]:
        job = job_of(row)
        time = step_time(job, hides_tp=row.get("hides_tp", True))
        seq_len = row["seq_len"]
        if "sequences_per_s" in row:
            published = row["sequences_per_s"] * seq_len / job.world
        elif "mfu" in row:
            published = row["mfu"] * job.machine.device_flops / flops_per_token(job.decoder, seq_len)
        else:
            published = row["tokens_per_s_device"]
        found.append(Compared(row, job, published, job.tokens_per_step / time.step_s / job.world, time.mfu))
    return tuple(found)
