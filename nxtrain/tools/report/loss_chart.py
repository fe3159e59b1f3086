"""Loss curve of a run as text, for a terminal or a log: `python -m nxtrain.tools.report.loss_chart RUN`.

The curve is drawn in braille characters, of 2 x 4 dots each, or in ASCII for an output whose encoding has none.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.jsonl import read
from nxtrain.common.run_folder import METRICS_FILE

Point = tuple[float, float]
"""Step and loss."""

ROWS = 10
"""Height of the plot in characters; the axes take two more lines, and the title one."""

WIDEST, NARROWEST = 100, 24
"""Bounds of the chart's width in characters."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character's dots, by row and column (Unicode 15, section 21.1)."""


@dataclass(frozen=True)
class Style:
    """Characters of a chart.

    Args:
        dots_x, dots_y: Dots of the curve in one character.
        curve: Sample of the curve, for the legend.
        held_out: Mark of an evaluation.
    """

    dots_x: int
    dots_y: int
    curve: str
    held_out: str
    axis: str
    tick: str
    corner: str
    line: str

    def draw(self, dots: Iterable[tuple[int, int]]) -> str:
        """Character for dots, each by column and row from the upper left; a blank for no dot."""
        bits = sum(_DOTS[y][x] for x, y in dots)
        if not bits:
            return " "
        if self.dots_x == 1:
            return "*"
        return chr(0x2800 + bits)


BRAILLE = Style(2, 4, "\u2824\u2824", "\u25cf", "\u2502", "\u2524", "\u2514", "\u2500")
ASCII = Style(1, 1, "*", "o", "|", "+", "+", "-")


def loss_chart(records: Iterable[Mapping[str, Any]], width: int, style: Style) -> str:
    """Draw the training loss as a curve, and the held-out loss of each evaluation as a mark.

    Args:
        records: Lines of metrics.jsonl; a loss that was not finite is null, and is left out.
        width: Characters of the longest line.

    Returns:
        Lines without a line feed at the end; a single line without a chart if no loss was recorded.
    """
    records = list(records)
    train, held_out = _points(records, "loss"), _points(records, "val_loss")
    if not train and not held_out:
        return "no loss is recorded yet"
    values = [loss for _, loss in (*train, *held_out)]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    last = max(step for step, _ in (*train, *held_out))
    labels = [f"{value:.2f}" for value in (high, 0.5 * (low + high), low)]
    margin = max(map(len, labels))
    columns = max(NARROWEST, min(width, WIDEST)) - margin - 2
    plot = _Plot(columns, ROWS, last, low, high, style)
    rows = plot.rows(train, held_out)
    marks = {0: labels[0], ROWS // 2: labels[1], ROWS - 1: labels[2]}
    lines = [f"loss (nats per token): {style.curve} training, {style.held_out} held-out text"]
    for number, row in enumerate(rows):
        label = marks.get(number, "")
        axis = style.tick if label else style.axis
        lines.append(f"{label:>{margin}} {axis}{row}".rstrip())
    end = f"step {last:g}"
    lines.append(f"{'':>{margin}} {style.corner}{style.line * columns}")
    lines.append(f"{'':>{margin}}  0{end:>{columns - 1}}")
    if width < NARROWEST:
        lines = [line[:width] for line in lines]
    return "\n".join(lines)


class _Plot:
    """Raster of the plot.

    Args:
        columns, lines: Size in characters.
        last: Step at the right edge.
        low, high: Loss at the lower and upper edge.
    """

    def __init__(self, columns: int, lines: int, last: float, low: float, high: float, style: Style) -> None:
        self._columns = columns
        self._lines = lines
        self._style = style
        self._last = last
        self._low = low
        self._high = high

    def rows(self, train: Sequence[Point], held_out: Sequence[Point]) -> list[str]:
        """Rows of the plot from the top."""
        style = self._style
        dots: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for x, y in self._curve(train):
            cell = (x // style.dots_x, y // style.dots_y)
            dots.setdefault(cell, set()).add((x % style.dots_x, y % style.dots_y))
        marks = {(self._x(step, 1), self._y(loss, 1)) for step, loss in held_out}
        rows = []
        for y in range(self._lines):
            row = ""
            for x in range(self._columns):
                row += style.held_out if (x, y) in marks else style.draw(dots.get((x, y), ()))
            rows.append(row)
        return rows

    def _curve(self, points: Sequence[Point]) -> Iterable[tuple[int, int]]:
        """Dots of the curve; each column has the mean of its points, and neighbours are connected."""
        columns: dict[int, list[float]] = {}
        for step, loss in points:
            columns.setdefault(self._x(step, self._style.dots_x), []).append(loss)
        means = [(x, math.fsum(losses) / len(losses)) for x, losses in sorted(columns.items())]
        if len(means) == 1:
            yield means[0][0], self._y(means[0][1], self._style.dots_y)
        for (x0, loss0), (x1, loss1) in pairwise(means):
            previous = self._y(loss0, self._style.dots_y)
            for x in range(x0, x1 + 1):
                y = self._y(loss0 + (loss1 - loss0) * (x - x0) / (x1 - x0), self._style.dots_y)
                # A steep curve fills the column between its neighbours' heights.
                yield from ((x, between) for between in range(min(previous, y), max(previous, y) + 1))
                previous = y

    def _x(self, step: float, dots: int) -> int:
        return min(int(self._columns * dots * step / self._last), self._columns * dots - 1)

    def _y(self, loss: float, dots: int) -> int:
        height = self._lines * dots
        return min(int(height * (self._high - loss) / (self._high - self._low)), height - 1)


def style_for(encoding: str | None) -> Style:
    """Characters that an output of this encoding can show."""
    try:
        (chr(0x28FF) + BRAILLE.held_out + BRAILLE.axis).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BRAILLE


def _points(records: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    points = []
    for record in records:
        step, loss = record.get("step"), record.get(key)
        if isinstance(step, int | float) and isinstance(loss, int | float) and step > 0 and math.isfinite(loss):
            points.append((step, loss))
    return points


def main(argv: Sequence[str]) -> int:
    """Print the chart of a run folder to standard output; return the exit code."""
    if len(argv) != 1:
        print("usage: python -m nxtrain.tools.report.loss_chart RUN", file=sys.stderr)
        return ConfigError.exit_code
    file = Path(argv[0]) / METRICS_FILE
    try:
        if not file.is_file():
            raise FileNotFoundError(2, "no such file; RUN is the folder of a run that has begun")
        records = read(file)
    except OSError as error:
        print(f"error: {file} cannot be read: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_code
    # The last column stays free, since some terminals wrap a full line.
    width = shutil.get_terminal_size().columns - 1
    print(loss_chart(records, width, style_for(sys.stdout.encoding)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
