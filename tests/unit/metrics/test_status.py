"""Time left of a run, on a clock that the test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.metrics.status import Status

if TYPE_CHECKING:
    from tests.unit.metrics.conftest import FakeClock


def test_eta_leaves_out_the_first_step_that_carried_compilation(clock: FakeClock) -> None:
    status = Status(100, BatchSizes(8), clock)
    clock.now += 600.0
    assert status.eta_s(41) is None
    clock.now += 30.0
    assert status.eta_s(51) == 49 * 3.0
    clock.now += 50.0
    assert status.eta_s(61) == 39 * 4.0
    assert status.elapsed_s() == 680.0
    assert status.eta_s(100) == 0.0


def test_eta_weighs_the_steps_of_a_ramp_by_their_batches(clock: FakeClock) -> None:
    status = Status(20, BatchSizes(40, ((10, 10),)), clock)
    assert status.eta_s(2) is None
    clock.now += 3.0  # three steps of 10 sequences; five of 10 and ten of 40 are left
    assert status.eta_s(5) == pytest.approx(45.0)
