"""NeuronX Distributed still goes through the courses that are recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nxd_golden import CASES, Distance, bound, recorded
from tests.support.nxd_stages import record
from tests.support.ranks import RankPool


@pytest.mark.nxd
@pytest.mark.parametrize("name", CASES)
def test_the_recorded_courses_are_nxds(pool: RankPool, example: Path, name: str) -> None:
    case = CASES[name]
    distance = Distance.between(record(pool, case, example), recorded()[name])
    assert distance.within(bound(case, recorded())), distance
