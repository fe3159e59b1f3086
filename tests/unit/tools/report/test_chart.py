"""Curves of charts, on drawn series: extremes stay, and everything lies inside the plot."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.tools.report.chart import HEIGHT, WIDTH, Curve, draw, smooth, thin

VALUES = st.lists(
    st.one_of(st.floats(-1e100, 1e100), st.floats(0.1, 10), st.sampled_from([0.0, 1e-300, 5e-324, 1.0])),
    min_size=1,
    max_size=200,
)


@given(values=VALUES, buckets=st.integers(1, 20))
def test_a_thinned_curve_keeps_the_extremes_of_every_bucket(values: list[float], buckets: int) -> None:
    series = np.array(values)
    kept = thin(series, buckets)
    assert np.all(np.diff(kept) > 0)
    assert {0, len(series) - 1} <= set(kept.tolist())
    assert len(kept) <= max(4 * buckets, len(series) if len(series) <= 4 * buckets else 0)
    edges = np.linspace(0, len(series), buckets + 1).astype(int)
    for a, b in pairwise(edges):
        if a < b:
            inside = series[kept[(kept >= a) & (kept < b)]]
            assert (inside.min(), inside.max()) == (series[a:b].min(), series[a:b].max())


@settings(max_examples=200)
@given(values=VALUES, first=st.integers(0, 2**52), zero=st.booleans(), kind=st.sampled_from(["line", "dots"]))
def test_curves_and_ticks_lie_inside_the_plot(values: list[float], first: int, zero: bool, kind: str) -> None:
    series = np.array(values)
    chart = draw(
        "key", "Title", "unit", [Curve("a", 0, first + np.arange(len(series), dtype=float), series, kind)], zero=zero
    )
    assert chart is not None
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", chart["curves"][0].path.replace("h0", ""))]
    x, y = np.array(numbers[::2]), np.array(numbers[1::2])
    assert np.all((x >= -0.01) & (x <= WIDTH + 0.01))
    assert np.all((y >= -0.01) & (y <= HEIGHT + 0.01))
    if kind == "line":  # points read back from the drawing are those of the series
        low, high = chart["y_range"]
        kept = series[thin(series)]
        if chart["is_log"]:
            kept, low, high = np.log(kept), np.log(low), np.log(high)
        wanted = HEIGHT * (high - kept) / (high - low)
        np.testing.assert_allclose(y, wanted, atol=0.006)
    assert all(0 <= at <= 100 for at, _ in (*chart["x_ticks"], *chart["y_ticks"]))
    assert chart["x_ticks"]
    assert len(chart["y_ticks"]) <= 20


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.integers(1, 30))
def test_smoothed_values_are_the_means_around_them(values: list[float], window: int) -> None:
    half = window // 2
    wanted = [np.mean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
    np.testing.assert_allclose(smooth(np.array(values), window), wanted, atol=1e-9)


def test_no_point_is_no_chart() -> None:
    assert draw("key", "Title", "", [Curve("a", 0, np.empty(0), np.empty(0))]) is None


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    spiked = np.ones(50)
    spiked[30] = 1000.0
    chart = draw("key", "Title", "", [Curve("a", 0, np.arange(50.0), spiked)])
    assert chart is not None
    assert chart["is_log"]
    assert [text for _, text in chart["y_ticks"]] == ["1", "10", "100", "1,000"]
