"""A run that something befalls all the time; `scripts/soak.py` is the long one, of any seeds."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.testing.fault_kinds import KINDS
from nxtrain.testing.fault_points import POINTS, parse
from tests.support.soak import MARGIN, drawn, soak


@pytest.mark.alone
def test_whatever_befalls_a_run_it_stays_what_it_was(started_by: ForkServerContext, tmp_path: Path) -> None:
    report = soak(started_by, tmp_path, 6, steps=40, mean_steps=6.0, pace_s=0.1)
    assert report.faults >= 5
    assert report.restarts >= 3
    assert 2 * MARGIN < report.expected < 1.0, "what `soak` holds the goodput against says nothing here"
    assert report.goodput < 1.0


WORKER_KINDS = {"killworker", "stopworker"}


def test_the_long_one_draws_all_that_ends_or_hinders_a_run_at_every_point() -> None:
    found = [fault for seed in range(5) for text in drawn(seed, 2000, 20.0) for fault in parse(text)]
    # The data of the long run have no workers.
    assert {fault.point for fault in found} == {*POINTS} - {"log", "worker"}
    assert {fault.kind for fault in found} == {*KINDS} - {"sleep", "nan", "inf", "spike", "flip", *WORKER_KINDS}
    assert drawn(3, 200, 20.0) == drawn(3, 200, 20.0) != drawn(4, 200, 20.0)
