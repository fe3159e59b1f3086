"""Charts of the HTML report: axes, ticks, and SVG paths of curves with a bounded number of points.

A plot is stretched to the width of the screen. Its labels are HTML text, so that a phone shows them as large as a
desktop does. Coordinates run from 0 to `WIDTH` across, and from 0 at the top to `HEIGHT` at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from nxtrain.common.text import short
from nxtrain.tools import svg
from nxtrain.tools.report.columns import Column

WIDTH, HEIGHT = 1000, 400

BUCKETS = 600  # buckets of a thinned curve; each keeps its first, lowest, highest and last point
MOST_MARKS = 100  # maximum number of marks of a curve; the highest are kept

# The axis is logarithmic if all values exceed LOG_LEAST and the highest exceeds LOG_FACTOR times the median.
LOG_FACTOR = 30.0
LOG_LEAST = 1e-100


@dataclass(frozen=True)
class Curve:
    """One curve of a chart, with its points and style."""

    name: str
    color: int
    steps: Column  # (N,) points, with rising steps and finite values
    values: Column
    kind: str = "line"  # `line`, `faint`, `dashed`, or `dots` and `spikes` without a line
    path: str = ""  # SVG path, once the curve is drawn


def draw(
    key: str, title: str, unit: str, curves: Sequence[Curve], *, note: str = "", wide: bool = False, zero: bool = False
) -> dict[str, Any] | None:
    """Lay out curves on common axes, as data for the HTML template; None if no curve has a point.

    Args:
        key: Identifier of the chart in the page.
        unit: Unit of the values.
        note: Text below the chart.
        wide: The chart takes the page's whole width.
        zero: The vertical axis includes 0.
    """
    curves = [curve for curve in curves if len(curve.values)]
    if not curves:
        return None
    first, last = min(float(c.steps[0]) for c in curves), max(float(c.steps[-1]) for c in curves)
    x_range = (first, last)
    if first == last:
        x_range = (first - 0.5, last + 0.5)
    low, high = min(float(c.values.min()) for c in curves), max(float(c.values.max()) for c in curves)
    lines = [curve for curve in curves if curve.kind in ("line", "faint")] or curves
    middle = max(float(np.median(c.values)) for c in lines)
    is_log = low > LOG_LEAST and high / middle > LOG_FACTOR and not zero
    y_range = _padded(low, high, is_log=is_log, zero=zero)
    described = [curve for curve in curves if curve.kind != "faint"]
    return {
        "key": key,
        "title": title,
        "unit": unit,
        "note": note,
        "wide": wide,
        "curves": [replace(c, path=_path(c, x_range, y_range, is_log=is_log)) for c in curves],
        "is_log": is_log,
        "x_range": x_range,
        "y_range": y_range,
        "x_ticks": _ticks(x_range, is_log=False, most=6),
        "y_ticks": [(round(100 - at, 3), text) for at, text in _ticks(y_range, is_log=is_log, most=5)],
        "text": " ".join(_sentence(curve) for curve in described),
        "head": ["step", *(curve.name for curve in described)],
        "rows": _rows(described),
    }


def thin(values: Column, buckets: int = BUCKETS) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Choose the points of a long curve to draw, from (N,) finite values.

    Args:
        buckets: Number of equal parts of the curve.

    Returns:
        Rising indices of the first, lowest, highest and last value of each bucket.
    """
    if len(values) <= 4 * buckets:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), buckets + 1).astype(np.intp)
    indices = [edges[:-1], edges[1:] - 1]
    for find in (np.argmin, np.argmax):
        indices.append(np.array([a + find(values[a:b]) for a, b in pairwise(edges)], dtype=np.intp))
    return np.unique(np.concatenate(indices))


def smooth(values: Column, window: int) -> Column:
    """Moving average over a centered window of values, which is shorter at both ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(0, at - window // 2), np.minimum(len(values), at + window // 2 + 1)
    return np.asarray((total[last] - total[first]) / (last - first))


def _path(curve: Curve, x_range: tuple[float, float], y_range: tuple[float, float], *, is_log: bool) -> str:
    is_marks = curve.kind in ("dots", "spikes")
    if is_marks:
        indices = np.sort(np.argsort(curve.values, kind="stable")[-MOST_MARKS:])
    else:
        indices = thin(curve.values)
    values = curve.values[indices]
    low, high = y_range
    if is_log:
        values = np.log(values)
        low = math.log(low)
        high = math.log(high)
    x = (WIDTH * (curve.steps[indices] - x_range[0]) / (x_range[1] - x_range[0])).tolist()
    y = (HEIGHT * (high - values) / (high - low)).tolist()
    if is_marks or len(y) == 1:
        return "".join(f"M{a:.2f} {b:.2f}h0" for a, b in zip(x, y, strict=True))
    return svg.path(x, y)


def _padded(low: float, high: float, *, is_log: bool, zero: bool) -> tuple[float, float]:
    """Limits of the vertical axis, slightly outside the range of the values."""
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if is_log:
        factor = (high / low) ** 0.04
        return low / factor, high * factor
    room = 0.04 * (high - low)
    if room <= 1e-12 * max(abs(low), abs(high)):  # equal values, or equal in all but the last digits
        room = 0.05 * max(abs(low), abs(high)) or 1.0
    return (low - room * (low != 0 or not zero), high + room)


def _ticks(edges: tuple[float, float], *, is_log: bool, most: int) -> list[tuple[float, str]]:
    """Tick positions of round values along an axis in percent, with their labels."""
    low, high = edges
    values: list[float] = []
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = [1]
        if last - first <= 2:  # noqa: PLR2004 - few powers leave room between them
            factors = [1, 2, 5]
        for power in range(first, last + 1, max(1, (last - first) // 5)):
            values += [factor * 10.0**power for factor in factors]
        scaled = [math.log(value / low) / math.log(high / low) for value in values]
    else:
        # Multiples of 1, 2 or 5 times a power of ten, about `most` of them.
        raw = (high - low) / most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10, 20) if unit * factor >= raw)
        first, digits = math.ceil(low / step), max(0, -math.floor(math.log10(step)))
        values += [round(number * step, digits) for number in range(first, first + most + 2) if number * step <= high]
        scaled = [(value - low) / (high - low) for value in values]
    return [(round(100 * at, 3), short(value)) for at, value in zip(scaled, values, strict=True) if 0 <= at <= 1]


def _sentence(curve: Curve) -> str:
    first, last = curve.values[0], curve.values[-1]
    return (
        f"{curve.name}: {short(float(first))} at step {curve.steps[0]:,.0f}, {short(float(last))} at step "
        f"{curve.steps[-1]:,.0f}, lowest {short(float(curve.values.min()))}, "
        f"highest {short(float(curve.values.max()))}."
    )


def _rows(curves: Sequence[Curve]) -> list[list[str]]:
    """Text table of the curves: about ten steps, one row for each step."""
    longest = max(curves, key=lambda curve: len(curve.steps))
    indices = np.unique(np.linspace(0, len(longest.steps) - 1, 11).astype(np.intp))
    rows = []
    for step in longest.steps[indices].tolist():
        cells = [f"{step:,.0f}"]
        for curve in curves:
            at = int(np.searchsorted(curve.steps, step))
            has_step = at < len(curve.steps) and curve.steps[at] == step
            cells.append(short(float(curve.values[at])) if has_step else "")
        rows.append(cells)
    return rows
