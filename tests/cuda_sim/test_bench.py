"""Benchmarks on a pretended GPU: what they queue, what they read, and that they come to their end.

Events of this device are 1 ms apart, whatever lies between them: the figures mean nothing, and no test shows one.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nxtrain.tools.bench.train import PEAK, Workload
from tests.cuda_sim.test_steps import SHAPE
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

STEPS = 3
WORK = Workload(STEPS, 2, 256, "bf16", {**SHAPE, "num_hidden_layers": 2, "intermediate_size": 512}, backend="cuda")


def turn_of(name: str) -> tuple[Record, dict[str, Any]]:
    """Record and measurement of the second turn of a side of `bench train`."""
    from nxtrain.tools.bench import training

    with opened_gpu() as backend:
        training.open_backend = lambda _: backend  # type: ignore[assignment]
        turn = training.turns(name, asdict(WORK))[""]
        turn()
        with recorded() as record:
            measured = turn()
    return record, measured


def reads(record: Record) -> int:
    """Numbers that the host reads, each by a copy for which the host waits."""
    return len([copy for copy in record.of("copy") if copy.fields["from"] == "device"])


def test_the_peak_queues_products_and_reads_once(gpu: SimulatedGpu) -> None:
    from nxtrain.tools.bench.training import DEVICE_PRODUCTS, QUEUED, REPEATS

    record, measured = gpu.run(turn_of, PEAK)
    products = [kernel for kernel in record.kernels if "gemm" in kernel.lower()]
    assert len(products) == QUEUED * REPEATS * len(DEVICE_PRODUCTS)
    assert reads(record) == REPEATS * len(DEVICE_PRODUCTS)
    assert "device" in measured


def test_steps_of_a_turn_are_queued_and_the_last_loss_is_read(gpu: SimulatedGpu) -> None:
    record, measured = gpu.run(turn_of, "nxtrain")
    assert reads(record) == 1
    attention = [kernel for kernel in record.kernels if "flash_fwd" in kernel]
    assert len(attention) == STEPS * 2
    assert measured["device"] == "cuda"
