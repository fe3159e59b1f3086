"""Bar chart of speed ratios as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.tools import svg

# Pixels: height of a bar, space between bars, width of the labels and of the plot, height of the title.
BAR = 22
GAP = 10
LABEL = 250
WIDTH = 420
HEAD = 64


def check_chart(file: Path | None) -> None:
    """Raise a ConfigError if the chart's file is not an SVG file or its folder does not exist."""
    if file is None:
        return
    if file.suffix.lower() != ".svg":
        raise ConfigError([Problem("--chart", f"{file.name} is not an SVG file, the only format", hint="use FILE.svg")])
    if not file.parent.is_dir():
        raise ConfigError([Problem("--chart", f"there is no folder {file.parent}", hint="create the folder first")])


def write_chart(
    file: Path, bars: Mapping[str, Sequence[float]], title: str, machine: Mapping[str, Any], details: str = ""
) -> None:
    """Write a bar chart of speed ratios.

    Each bar is the median over rounds of one ratio. A line in the bar spans the range over rounds. A dashed line marks
    1.
    """
    longest = max((max(rounds) for rounds in bars.values()), default=1.0)
    scale = WIDTH / max(1.0, longest)
    height = HEAD + len(bars) * (BAR + GAP) + GAP
    under = f"{machine['cpu']}, {', '.join(machine['instructions'])}{details}"
    parts = [svg.text(10, 22, title, size=15), svg.text(10, 42, under)]
    for number, (label, rounds) in enumerate(bars.items()):
        top = HEAD + number * (BAR + GAP)
        middle = top + BAR / 2
        low, high = LABEL + min(rounds) * scale, LABEL + max(rounds) * scale
        value = median(rounds)
        color = "#2a7f62" if value >= 1 else "#b5533c"
        parts += [
            svg.text(LABEL - 8, middle + 4, label, anchor="end"),
            svg.box(LABEL, top, value * scale, BAR, color),
            svg.line(low, middle, high, middle, color=svg.INK, width=2),
            svg.text(high + 8, middle + 4, f"{value:.2f}"),
        ]
    one = LABEL + scale
    parts.append(svg.line(one, HEAD - 6, one, height - GAP, color=svg.INK, dashed=True))
    file.write_text(svg.picture(LABEL + WIDTH + 80, height, parts), encoding="utf-8")
