"""Plans of feed-forwards in chunks of the sequence, compared with a rank on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from nxtrain.backends.limits import LONG_SEQUENCE
from nxtrain.nn.mlp import GatedMLP
from nxtrain.plan import activations
from nxtrain.plan.job import Job
from nxtrain.plan.memory import stage_bytes
from nxtrain.tools.trace.fake_rank import trace_job
from tests.support.memory import TOLERANCE
from tests.unit.plan import test_context

LENGTH = 2 * LONG_SEQUENCE + 64
LORA = {"method": "lora", "r": 8, "dropout": 0.0}


def job_of(length: int, remat: str, parallel: dict[str, Any], finetune: dict[str, Any], **model: Any) -> Job:
    job = test_context.job_of(parallel, seq_len=length, remat=remat, global_batch=1)
    shape = {name: value for name, value in model.items() if name != "fused_gate_up"}
    tables: dict[str, Any] = {"finetune": finetune, "model": {k: v for k, v in model.items() if k not in shape}}
    config = job.config
    for section, values in tables.items():
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
    return Job(job.dimensions, job.machine, 1, config)


@pytest.mark.parametrize(
    ("remat", "parallel", "finetune", "model"),
    [
        ("selective", {}, {}, {}),
        ("full", {}, {}, {"fused_gate_up": False}),
        ("selective", {"tp": 2, "sequence_parallel": True}, {}, {}),
        ("full", {"tp": 2}, {}, {}),
        ("selective", {}, LORA, {}),
    ],
)
def test_a_rank_takes_the_planned_memory(
    monkeypatch: pytest.MonkeyPatch,
    remat: str,
    parallel: dict[str, Any],
    finetune: dict[str, Any],
    model: dict[str, Any],
) -> None:
    monkeypatch.setitem(test_context.SHAPE, "intermediate_size", 2048)
    job = job_of(LENGTH, remat, parallel, finetune, **model)
    result, planned = trace_job(job, 0), stage_bytes(job, 0)
    assert planned.total - planned.workspace == pytest.approx(result.total, rel=TOLERANCE)
    monkeypatch.setattr(GatedMLP, "num_chunks", lambda *_: 1)
    assert trace_job(job, 0).total > 1.3 * result.total
    monkeypatch.setattr(activations, "num_chunks", lambda _: 1)
    whole = stage_bytes(job_of(LENGTH, remat, parallel, finetune, **model), 0)
    assert whole.total - whole.workspace > 1.3 * result.total


@pytest.mark.parametrize(
    ("length", "remat", "parallel", "finetune", "number"),
    [
        (LONG_SEQUENCE, "selective", {}, {}, 1),
        (LONG_SEQUENCE + 64, "selective", {}, {}, 2),
        (LONG_SEQUENCE + 64, "full", {}, {}, 2),
        (LONG_SEQUENCE + 64, "none", {}, {}, 1),
        (4 * LONG_SEQUENCE, "full", {"cp": 2}, {}, 2),
        (4 * LONG_SEQUENCE, "full", {}, {**LORA, "dropout": 0.1}, 1),
        (4 * LONG_SEQUENCE, "full", {}, LORA, 4),
    ],
)
def test_rows_beyond_the_limit_alone_have_chunks(
    length: int, remat: str, parallel: dict[str, Any], finetune: dict[str, Any], number: int
) -> None:
    assert activations.num_chunks(job_of(length, remat, parallel, finetune)) == number


def test_the_width_of_a_feed_forward_costs_the_same_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {}
    for length in (2 * LONG_SEQUENCE, 8 * LONG_SEQUENCE):
        peaks = []
        for width in (1024, 2048):
            monkeypatch.setitem(test_context.SHAPE, "intermediate_size", width)
            peaks.append(trace_job(job_of(length, "full", {}, {}), 0).total)
        extra[length] = peaks[1] - peaks[0]
    assert extra[8 * LONG_SEQUENCE] <= extra[2 * LONG_SEQUENCE]
