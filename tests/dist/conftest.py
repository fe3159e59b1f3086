"""Ranks for the lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import nxd_cpu
from tests.support.ranks import RankPool, ranks

__all__ = ["nxd_ranks", "ranks"]


@pytest.fixture(scope="session")
def nxd_ranks() -> Iterator[RankPool]:
    """Processes that play ranks with the layers of NeuronX Distributed."""
    pool = RankPool("cpu", nxd_cpu.prepare, layers="nxd")
    yield pool
    pool.close()


@pytest.fixture(params=["native", pytest.param("nxd", marks=pytest.mark.nxd)])
def either(request: pytest.FixtureRequest) -> RankPool:
    """Ranks with each layer set in turn."""
    pool: RankPool = request.getfixturevalue("ranks" if request.param == "native" else "nxd_ranks")
    return pool
