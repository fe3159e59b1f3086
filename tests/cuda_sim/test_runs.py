"""Whole runs of `nxtrain train` on a pretended GPU: evaluation, checkpoints and a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nxtrain.backends.cuda import CudaBackend
from nxtrain.train import trainer
from nxtrain.train.checkpoints import Checkpoints
from nxtrain.train.step import eval_step, train_step
from tests.support.cuda_sim import Record, SimulatedGpu, marked, opened_gpu, recorded
from tests.support.runs import records, run_plan, train_rank

SHAPE = {"vocab_size": 384, "hidden_size": 128}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "masters": {"precision": {"params": "bf16", "update": "fp32_master"}},
    "offload": {
        "precision": {"params": "bf16", "update": "bf16_kahan"},
        "parallel": {"offload": ["activations"]},
    },
    "documents": {"precision": {"params": "bf16", "update": "bf16_stochastic"}, "data": {"doc_mask": True}},
    "documents_offload": {
        "precision": {"params": "bf16", "update": "fp32_master"},
        "parallel": {"offload": ["activations"]},
        "data": {"doc_mask": True},
        "train": {"remat": "selective"},
    },
    "muon": {"precision": {"params": "bf16", "update": "fp32_master"}, "optim": {"name": "muon"}},
    "experts": {
        "precision": {"params": "bf16", "update": "fp32_master"},
        "model": {"family": "mixtral", "config": {**SHAPE, "num_local_experts": 4}, "moe_dispatch": "capacity"},
    },
}


def run(folder: Path, steps: int, tables: Mapping[str, Mapping[str, Any]]) -> Record:
    """Record of a run of one rank, whose fetched numbers are ones, since kernels compute none.

    Sections are steps, passes of an evaluation, reads of numbers, and savings.
    """
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} " * 20, encoding="utf-8")
    sections: dict[str, dict[str, Any]] = {
        "data": {"source": "text", "path": str(texts), "validation_fraction": 0.2},
        "model": {"config": SHAPE},
        "train": {"eval_every": 2, "eval_batches": 2},
        "checkpoint": {"every": 2},
        "metrics": {"log_every": 2, "tensorboard": False, "progress": False},
        "optim": {"decay_steps": 10},
    }
    for name, table in tables.items():
        sections[name] = {**sections.get(name, {}), **table}
    resolved = run_plan(folder / "run", sections.pop("data"), steps=steps, **sections)
    with opened_gpu() as backend, recorded_run() as record:
        train_rank(backend, resolved)
    return record


@contextmanager
def recorded_run() -> Iterator[Record]:
    """Record a run in sections, with ones for its numbers, which no kernel computes, and replicas that are equal."""
    fetch = marked("fetch", CudaBackend.fetch)

    def ones(self: CudaBackend, values: Any) -> dict[str, float]:
        numbers = dict.fromkeys(fetch(self, values), 1.0)
        if "differing" in numbers:
            numbers["differing"] = 0.0
        return numbers

    with (
        patch.object(CudaBackend, "fetch", ones),
        patch.object(trainer, "train_step", marked("step", train_step)),
        patch.object(trainer, "eval_step", marked("eval", eval_step)),
        patch.object(Checkpoints, "save", marked("save", Checkpoints.save)),
        recorded() as record,
    ):
        yield record


def assert_few_waits(record: Record) -> None:
    """The host waits, after the first step, only where it reads numbers, once for each, or saves."""
    record = record.after("/step")
    training = {event.fields["thread"] for event in record.of("kernel", "point")}  # the writer of checkpoints waits
    of_training = Record([event for event in record.events if event.fields["thread"] in training])
    parts = of_training.parted("step", "eval", "fetch", "save")
    for section in ("step", "eval", ""):
        assert parts[section].host_waits == [], section
    assert len(parts["fetch"].of("sync")) == len(parts["fetch"].pageable_copies)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_waits_only_where_it_reads_numbers_or_saves(gpu: SimulatedGpu, tmp_path: Path, name: str) -> None:
    """Also after a resumption, whose weights come from the checkpoint."""
    for steps in (4, 6):
        record = gpu.run(run, tmp_path, steps, OPTIONS[name])
        assert_few_waits(record)
    read = records(tmp_path / "run")
    assert [(record["step"], record.get("val_loss")) for record in read][-3:] == [(2, 1.0), (4, 1.0), (6, 1.0)]
