"""Bar chart of ratios as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.tools import svg

# Pixels.
BAR = 22
"""Height of a bar."""
GAP = 10
"""Space between bars."""
LABEL = 250
"""Width of the labels."""
WIDTH = 420
"""Width of the plot."""
HEAD = 64
"""Height of the title."""


@dataclass(frozen=True)
class Bar:
    """Bar of a chart: its length is the median ratio over rounds, and a line shows their range."""

    label: str
    rounds: Sequence[float]


def check_chart(file: Path | None) -> None:
    """Refuse a chart that cannot be written.

    Raises:
        ConfigError: The file is not an SVG, or its folder does not exist.
    """
    if file is None:
        return
    if file.suffix.lower() != ".svg":
        raise ConfigError([Problem("--chart", f"{file.name} is no SVG file, the only format", hint="use FILE.svg")])
    if not file.parent.is_dir():
        raise ConfigError([Problem("--chart", f"there is no folder {file.parent}", hint="make it first")])


def write_chart(file: Path, bars: Sequence[Bar], title: str, machine: Mapping[str, Any], details: str = "") -> None:
    """Write a chart, with the name of the machine and details below the title."""
    under = f"{machine['cpu']}, {', '.join(machine['instructions'])}{details}"
    file.write_text(draw(bars, title, under), encoding="utf-8")


def draw(bars: Sequence[Bar], title: str, under: str) -> str:
    """Horizontal bars from top to bottom as SVG, with a dashed line at 1; `under` is the text below the title."""
    longest = max((max(bar.rounds) for bar in bars), default=1.0)
    scale = WIDTH / max(1.0, longest)
    height = HEAD + len(bars) * (BAR + GAP) + GAP
    parts = [svg.text(10, 22, title, size=15), svg.text(10, 42, under)]
    for number, bar in enumerate(bars):
        top = HEAD + number * (BAR + GAP)
        middle = top + BAR / 2
        low, high = LABEL + min(bar.rounds) * scale, LABEL + max(bar.rounds) * scale
        value = median(bar.rounds)
        color = "#2a7f62" if value >= 1 else "#b5533c"
        parts += [
            svg.text(LABEL - 8, middle + 4, bar.label, anchor="end"),
            svg.box(LABEL, top, value * scale, BAR, color),
            svg.line(low, middle, high, middle, color=svg.INK, width=2),
            svg.text(high + 8, middle + 4, f"{value:.2f}"),
        ]
    one = LABEL + scale
    parts.append(svg.line(one, HEAD - 6, one, height - GAP, color=svg.INK, dashed=True))
    return svg.picture(LABEL + WIDTH + 80, height, parts)
