"""Loss curve of a run as text for a terminal or a log: `python -m nxtrain.tools.report.loss_chart RUN`.

The curve consists of braille characters with 2 x 4 dots each. If the output's encoding has no braille, the curve is in
ASCII.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.jsonl import read
from nxtrain.common.run_folder import METRICS_FILE

ROWS = 10  # height of the plot in lines; axes take two more lines, and the title one
WIDEST, NARROWEST = 100, 24  # bounds of the chart's width in characters

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character's dots, by row and column (Unicode 15, section 21.1)."""


@dataclass(frozen=True)
class Style:
    """Characters with which a loss chart is drawn."""

    dots_x: int  # dots of the curve in one character
    dots_y: int
    curve: str  # sample of the curve, for the legend
    held_out: str  # mark of an evaluation
    axis: str
    tick: str
    corner: str
    line: str


BRAILLE = Style(2, 4, "\u2824\u2824", "\u25cf", "\u2502", "\u2524", "\u2514", "\u2500")
ASCII = Style(1, 1, "*", "o", "|", "+", "+", "-")


def loss_chart(records: Sequence[Mapping[str, Any]], width: int, style: Style) -> str:
    """Draw the training loss as a curve, and each held-out loss as a mark.

    Args:
        records: Records of the metrics file.
        width: Width in characters.
    """
    train, held_out = _points(records, "loss"), _points(records, "val_loss")
    points = [*train, *held_out]
    if not points:
        return "no loss is recorded yet"
    last = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    if low == high:
        low, high = low - 0.5, high + 0.5
    labels = {0: f"{high:.2f}", ROWS // 2: f"{0.5 * (low + high):.2f}", ROWS - 1: f"{low:.2f}"}
    margin = max(map(len, labels.values()))
    columns = max(NARROWEST, min(width, WIDEST)) - margin - 2

    def x_of(step: float, dots: int) -> int:
        return min(int(columns * dots * step / last), columns * dots - 1)

    def y_of(loss: float, dots: int) -> int:
        return min(int(ROWS * dots * (high - loss) / (high - low)), ROWS * dots - 1)

    # Each column of dots has the mean of its points. A steep curve fills it between its neighbours' heights.
    losses_at: dict[int, list[float]] = {}
    for step, loss in train:
        losses_at.setdefault(x_of(step, style.dots_x), []).append(loss)
    means = [(x, math.fsum(losses) / len(losses)) for x, losses in sorted(losses_at.items())]
    dots = {(x, y_of(loss, style.dots_y)) for x, loss in means}
    for (x0, loss0), (x1, loss1) in pairwise(means):
        previous = y_of(loss0, style.dots_y)
        for x in range(x0, x1 + 1):
            y = y_of(loss0 + (loss1 - loss0) * (x - x0) / (x1 - x0), style.dots_y)
            dots.update((x, between) for between in range(min(previous, y), max(previous, y) + 1))
            previous = y

    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = (x // style.dots_x, y // style.dots_y)
        bits[cell] = bits.get(cell, 0) | DOTS[y % style.dots_y][x % style.dots_x]
    cells = {cell: "*" if style is ASCII else chr(0x2800 + of_cell) for cell, of_cell in bits.items()}
    for step, loss in held_out:
        cells[x_of(step, 1), y_of(loss, 1)] = style.held_out
    unit = loss_unit(set().union(*records))
    lines = [f"loss ({unit}): {style.curve} training, {style.held_out} held-out text"]
    for row in range(ROWS):
        label = labels.get(row, "")
        axis = style.tick if label else style.axis
        drawn = "".join(cells.get((column, row), " ") for column in range(columns))
        lines.append(f"{label:>{margin}} {axis}{drawn}".rstrip())
    end = f"step {last:g}"
    lines.append(f"{'':>{margin}} {style.corner}{style.line * columns}")
    lines.append(f"{'':>{margin}}  0{end:>{columns - 1}}")
    if width < NARROWEST:
        lines = [line[:width] for line in lines]
    return "\n".join(lines)


def loss_unit(names: Container[str]) -> str:
    """Unit of a run's loss, by the names in its records."""
    if "pairs" in names:
        return "mean of the pairs"
    if "answers" in names:
        return "mean of the answers"
    return "nats per token"


def _points(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Steps and losses of the records that have both."""
    points = []
    for record in records:
        step, loss = record.get("step"), record.get(key)
        if isinstance(step, int | float) and isinstance(loss, int | float) and step > 0 and math.isfinite(loss):
            points.append((step, loss))
    return points


def style_for(encoding: str | None) -> Style:
    """Choose the characters that an output encoding can represent."""
    try:
        (chr(0x28FF) + BRAILLE.held_out + BRAILLE.axis).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BRAILLE


def main(argv: Sequence[str]) -> int:
    """Print the loss chart of a run folder to standard output, and return the exit code."""
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
