"""A process of `nxtrain bench growth`: one curve, a turn for each line on standard input.

python -m nxtrain.tools.bench.growth_worker CURVE JOB
"""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nxtrain.backends import open_backend
from nxtrain.tools.bench.checkpoint import FilledState
from nxtrain.tools.bench.growth import ACCUMULATION, CHECKPOINT, LAYERS, SEQ_LEN, START, WORLD, GrowthJob
from nxtrain.tools.bench.train import Workload
from nxtrain.tools.bench.turns import serve
from nxtrain.tools.bench.worker import ours

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SIZES = {SEQ_LEN: 256, LAYERS: SHAPE["num_hidden_layers"], ACCUMULATION: 1}
"""Sizes of the curves that are not measured."""

TRACED = {**SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
TP = 8


def main(job: GrowthJob) -> None:
    """Serve turns until standard input ends."""
    torch.set_num_threads(1)
    curves = {START: starts, CHECKPOINT: checkpoints, WORLD: traces}

    def make() -> dict[str, Callable[[], list[float]]]:
        acts = curves.get(job.curve, steps)(job)
        return {"": lambda: [_cpu_s(act) for act in acts]}

    serve(make)


def steps(job: GrowthJob) -> list[Callable[[], object]]:
    """One step at each size."""
    backend = open_backend("cpu")

    def make(size: int) -> Callable[[], float]:
        of = {**SIZES, job.curve: size}
        shape = {**SHAPE, "num_hidden_layers": of[LAYERS], "max_position_embeddings": of[SEQ_LEN]}
        work = Workload(1, of[ACCUMULATION], of[SEQ_LEN], "fp32", shape)
        return ours(work, backend, micro_batches=of[ACCUMULATION])[0]

    return [make(size) for size in job.sizes]


def starts(job: GrowthJob) -> list[Callable[[], object]]:
    """Construction of a model of each size, its weights drawn, and its optimizer."""
    backend = open_backend("cpu")
    shape = {**SHAPE, "max_position_embeddings": SIZES[SEQ_LEN]}
    works = [Workload(1, 1, SIZES[SEQ_LEN], "fp32", {**shape, "num_hidden_layers": size}) for size in job.sizes]
    return [partial(ours, work, backend) for work in works]


def checkpoints(job: GrowthJob) -> list[Callable[[], object]]:
    """Save and load of a checkpoint of each size, in a folder for temporary files."""
    scratch = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)

    def make(mib: int) -> Callable[[], None]:
        folder = scratch / str(mib)
        folder.mkdir()
        state = FilledState(folder, mib)

        def act() -> None:
            state.clear()
            state.save()
            state.load()

        return act

    return [make(size) for size in job.sizes]


def traces(job: GrowthJob) -> list[Callable[[], object]]:
    """One trace in each world."""
    from nxtrain.common.family import find_family
    from nxtrain.config.check import Resolved
    from nxtrain.config.schema import RunConfig
    from nxtrain.tools.trace.trace import trace

    family = find_family("llama")

    def plan(world: int) -> Resolved:
        tables: dict[str, Any] = {
            "train": {"seq_len": 32, "global_batch": world // TP, "micro_batch": 1},
            "parallel": {"tp": TP, "sequence_parallel": True},
        }
        shape = {**TRACED, "num_key_value_heads": TP, "max_position_embeddings": 32}
        return Resolved(RunConfig.model_validate(tables), family, family.config_type.model_validate(shape))

    return [partial(trace, plan(world), world, [0], steps=2, hlo=None) for world in job.sizes]


def _cpu_s(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


if __name__ == "__main__":
    main(GrowthJob(**json.loads(sys.argv[2])))
