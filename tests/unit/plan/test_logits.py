"""Plans of the loss: the chunks of logits that a device has by default, and the bytes that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxtrain.plan.job import Job
from nxtrain.plan.logits import chunk_bytes
from tests.support.published import job_of
from tests.unit.plan.test_adapters import ROW


def job(backend: str, loss_chunk_mib: int = 0) -> Job:
    result = job_of({**ROW, "micro_batch": 4, "loss_chunk_mib": loss_chunk_mib})
    chosen = result.config.backend.model_copy(update={"name": backend})
    return replace(result, config=result.config.model_copy(update={"backend": chosen}))


@pytest.mark.parametrize(
    ("backend", "mib"),
    [("auto", 2048), ("cuda", 2048), ("cpu", 64), ("xla", 64), ("neuron", 64), ("neuron-native", 64)],
)
def test_logits_of_a_chunk_are_those_of_the_device(backend: str, mib: int) -> None:
    """A machine of GPUs has the backend cuda."""
    assert chunk_bytes(job(backend)) == chunk_bytes(job(backend, mib))
    assert chunk_bytes(job(backend)) != chunk_bytes(job(backend, mib // 2))


def test_a_key_counts_on_every_device() -> None:
    assert chunk_bytes(job("cuda", 64)) == chunk_bytes(job("cpu", 64))
