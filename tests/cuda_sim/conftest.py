"""Pretended GPUs, and the reason where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda_sim import SimulatedGpu, why_not


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimulatedGpu]:
    """A process with eight pretended H200, which the tests of a file share."""
    if reason := why_not():
        pytest.skip(reason)
    opened = SimulatedGpu()
    yield opened
    opened.close()
