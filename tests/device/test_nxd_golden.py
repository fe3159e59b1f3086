"""NeuronX Distributed still goes through the courses that are recorded of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.nxd_golden import CASES, Distance, bound, recorded
from tests.support.nxd_stages import record
from tests.support.ranks import RankPool

EXAMPLE = "NXD_EXAMPLE"
"""Variable with the path of the example's model, which no package contains."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes whose torch-xla calls gloo."""
    with closing(RankPool()) as opened:
        yield opened


@pytest.fixture(scope="module")
def example() -> Path:
    if EXAMPLE not in os.environ:
        pytest.skip(f"{EXAMPLE} does not name modeling_llama_nxd.py of NeuronX Distributed's examples")
    return Path(os.environ[EXAMPLE])


@pytest.mark.nxd
@pytest.mark.parametrize("name", CASES)
def test_the_recorded_courses_are_nxds(pool: RankPool, example: Path, name: str) -> None:
    case = CASES[name]
    distance = Distance.between(record(pool, case, example), recorded()[name])
    assert distance.within(bound(case, recorded())), distance
