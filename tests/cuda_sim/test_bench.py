"""Benchmarks on a pretended GPU: what they queue, what they read, and that they come to their end.

Events of this device are 1 ms apart, whatever lies between them: the figures mean nothing, and no test shows one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxtrain.tools.bench.train import OURS, PEAK, Workload, summarize
from tests.cuda_sim.test_steps import SHAPE
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, play, recorded

STEPS = 3
WORK = Workload(STEPS, 2, 256, "bf16", {**SHAPE, "num_hidden_layers": 2, "intermediate_size": 512}, backend="cuda")


def turn_of(name: str) -> tuple[Record, dict[str, Any]]:
    """Record and measurement of the second turn of a side of `bench train`."""
    from nxtrain.tools.bench import training

    with opened_gpu() as backend:
        with patch.object(training, "open_backend", lambda _: backend):
            turn = training.turns(name, asdict(WORK))[""]
        turn()
        with recorded() as record:
            measured = turn()
    return record, measured


def reads(record: Record) -> int:
    """Numbers that the host reads, each by a copy for which the host waits."""
    return sum(copy.fields["from"] == "device" != copy.fields["to"] for copy in record.of("copy"))


def test_the_peak_queues_products_and_reads_once(gpu: SimulatedGpu) -> None:
    from nxtrain.tools.bench.training import DEVICE_PRODUCTS, QUEUED, REPEATS

    record, measured = gpu.run(turn_of, PEAK)
    products = [kernel for kernel in record.kernels if "gemm" in kernel.lower()]
    assert len(products) == QUEUED * REPEATS * len(DEVICE_PRODUCTS)
    assert reads(record) == REPEATS * len(DEVICE_PRODUCTS)
    assert "device" in measured


def test_steps_of_a_turn_are_queued_and_the_last_loss_is_read(gpu: SimulatedGpu) -> None:
    record, measured = gpu.run(turn_of, OURS)
    assert reads(record) == 1
    attention = [kernel for kernel in record.kernels if "flash_fwd" in kernel]
    assert len(attention) == STEPS * 2
    assert summarize({OURS: [measured], PEAK: [{**measured, "device": 1e-3}]}, WORK)["clock"] == "device"


def turn_of_collectives(backend: Any) -> tuple[Record, dict[str, Any]]:
    from nxtrain.tools.bench import collectives

    job = collectives.CollectivesJob(2, [4], "cuda")
    with patch.object(collectives, "open_backend", lambda *_: backend):
        turn = collectives.turns("", asdict(job))[""]
    with recorded() as record:
        measured = turn()
    return record, measured


def test_collectives_of_a_device_are_queued_and_read_once(gpu: SimulatedGpu) -> None:
    from nxtrain.tools.bench.collectives import MOST_REPEATS, OPERATIONS, summarize

    turns = gpu.run(play, 2, turn_of_collectives)
    for rank, (record, _) in enumerate(turns):
        calls = Counter(event.fields["name"] for event in record.of("nccl"))
        for name, op in (("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter")):
            assert calls[name] == 1 + MOST_REPEATS, op
        assert calls["receive" if rank else "send"] == 1 + MOST_REPEATS
        assert reads(record) == 2 * len(OPERATIONS)
    result = summarize([[measured for _, measured in turns]])
    assert (result["clock"], {*result["latency_s"]}) == ("device", {*OPERATIONS})


def updates_of(name: str) -> dict[str, tuple[int, int]]:
    """Kernels and reads of one measurement of each rule, on a model of one small block."""
    from nxtrain.tools.bench import optim
    from nxtrain.tools.bench.clocks import clocks_of

    result = {}
    with opened_gpu() as backend, patch.dict(vars(optim), {"SHAPE": WORK.shape}):
        layout = optim.layout_of(backend, 1)
        grads = {name: backend.put(torch.zeros(spec.shape)) for name, spec in layout.table.items()}
        rules = optim.ADAMW.model_copy(update={"name": name})
        hidden = optim.hidden_names(layout) if name == "muon" else []
        sides = {"torch": optim._torchs(grads, hidden)}
        for case in optim.CASES:
            sides[case.name] = optim._ours(case, layout, backend, grads, rules)[0]
        for side, update in sides.items():
            turn = optim.timed(update, clocks_of(backend), backend)
            turn()
            with recorded() as record:
                turn()
            result[side] = len(record.kernels), reads(record)
    return result


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_updates_on_a_device_are_queued_and_read_once(gpu: SimulatedGpu, name: str) -> None:
    from nxtrain.tools.bench.optim import CASES, QUEUED

    counted = gpu.run(updates_of, name)
    assert {*counted} == {"torch", *(case.name for case in CASES)}
    for side, (kernels, num_reads) in counted.items():
        assert kernels >= QUEUED and num_reads == 1, side


def turn_of_a_stage(backend: Any, schedule: str) -> tuple[Record, dict[str, Any]]:
    from nxtrain.tools.bench import pipeline_rank
    from nxtrain.tools.bench.pipeline import StageWork

    work = StageWork(2, 1, schedule, 4, 1e-4, 16, "cuda")  # type: ignore[arg-type]
    with patch.object(pipeline_rank, "open_backend", lambda *_: backend):
        turn = pipeline_rank.turns("", asdict(work))[""]
    with recorded() as record:
        measured = turn()
    return record, measured


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_of_a_device_multiply_and_send(gpu: SimulatedGpu, schedule: str) -> None:
    """A product takes 50 us by this device's events, so that a forward of 100 us is two."""
    from nxtrain.tools.bench.pipeline import PipelineTurn

    turns = gpu.run(play, 2, turn_of_a_stage, schedule)
    for rank, (record, measured) in enumerate(turns):
        kinds = Counter(kind for kind, *_ in measured["actions"])
        assert kinds["forward"] == kinds["backward"] == 4
        assert kinds["weight"] == (4 if schedule == "zero_bubble" else 0)
        products = [kernel for kernel in record.kernels if "gemm" in kernel.lower()]
        assert len(products) == 4 * (2 + 4)
        assert measured["sent_bytes"] == 4 * 16 * 512 * 4
        calls = Counter(event.fields["name"] for event in record.of("nccl"))
        assert calls["send"] == calls["receive"] == 4, rank
        assert reads(record) == 0
    assert len(PipelineTurn.read([measured for _, measured in turns]).spans) > 16
