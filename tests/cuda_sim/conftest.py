"""Pretended GPUs, and the reason where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda_sim import SimulatedGpu, why_not


@pytest.fixture(scope="session", autouse=True)
def _can_pretend() -> None:
    """Skip the lane where no GPU can be pretended: without gcc, Linux on x86-64, or torch's wheel for CUDA."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimulatedGpu]:
    """A process with eight pretended H200, which the tests of a file share."""
    opened = SimulatedGpu()
    yield opened
    opened.close()
