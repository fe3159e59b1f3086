"""Statistics of stability on the page, against numpy's fit and a count by hand, on drawn records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.tools.report.columns import Columns
from nxtrain.tools.report.facts import FEWEST_FITTED, FIT_FROM, fit_of, stability
from nxtrain.tools.report.run import RecordedRun


def run_of(steps: Any, **columns: Any) -> RecordedRun:
    spikes = columns.pop("spikes", ())
    numbers = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    return RecordedRun(Path("run"), "run", Columns(np.array(steps, dtype=np.float64), numbers, spikes=tuple(spikes)))


def shown_of(run: RecordedRun) -> dict[str, str]:
    """Rows of the page's table for one run."""
    return {row[0]: row[1] for row in stability([run]).rows}


@given(
    steps=st.lists(st.integers(0, 5000), min_size=FEWEST_FITTED, max_size=120, unique=True).map(sorted),
    seed=st.integers(0, 999),
)
def test_the_loss_is_fitted_over_the_logarithm_of_the_step_as_numpy_does(steps: list[int], seed: int) -> None:
    losses = np.random.default_rng(seed).normal(3.0, 1.0, len(steps))
    late = [at for at, step in enumerate(steps) if step > FIT_FROM * steps[-1] and step > 0]
    found = fit_of(run_of(steps, loss=losses))
    if len(late) < FEWEST_FITTED:
        assert found is None
        return
    x = np.log10([steps[at] for at in late])
    slope, intercept = np.polyfit(x, losses[late], 1)
    assert found is not None
    assert found["first"] == steps[late[0]]
    assert found["slope"] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert found["spread"] == pytest.approx((losses[late] - slope * x - intercept).std(), rel=1e-6)


def test_a_loss_that_falls_by_a_half_with_each_tenfold_is_shown_so() -> None:
    steps = range(1, 1001)
    shown = shown_of(run_of(steps, loss=[4 - 0.5 * math.log10(step) for step in steps]))
    assert shown["loss by a tenfold of steps"] == "-0.500 after step 201"
    assert shown["spread around that line"] == "0.000"


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6)), min_size=1, max_size=30))
def test_spikes_are_counted_with_the_share_of_one_step_and_the_longest(spikes: list[tuple[int, int]]) -> None:
    means = {"grad_norm_mean": [0.9, 0.75], "grad_norm_lowest": [0.5, 0.25]}
    shown = shown_of(run_of([1, 2], loss=[1, 1], spikes=spikes, **means))
    ones = [length for _, length in spikes if length == 1]
    assert shown["spikes of the gradient norm"] == str(len(spikes))
    assert shown["of one step"] == f"{len(ones) / len(spikes):.0%}"
    assert shown["longest spike, in steps"] == str(max(length for _, length in spikes))
    assert shown["growth over the lowest"] == "3.00 times"
