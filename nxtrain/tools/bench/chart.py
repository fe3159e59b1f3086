"""Bar chart of ratios as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from nxtrain.common.errors import ConfigError, Problem

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


def draw_ratios(file: Path, result: Mapping[str, Any]) -> None:
    """Draw the ratios of `nxtrain bench train`, each with the range of its rounds.

    Args:
        file: Where to write.
        result: Result of the benchmark, as its JSON has it.
    """
    bars = {}
    for ours, ratios in result["ratios_of"].items():
        for peer, ratio in ratios.items():
            if peer not in result["ratios_of"]:
                bars[f"{ours} / {peer}"] = (ratio["value"], min(ratio["rounds"]), max(ratio["rounds"]))
    title = f"nxtrain bench train: speed over peers ({result['clock']} time, 1.0 = equal)"
    draw(file, bars, title, result["machine"], f"; {result['precision']}, {result['threads']} threads")


def draw(
    file: Path,
    bars: Mapping[str, tuple[float, float, float]],
    title: str,
    machine: Mapping[str, Any],
    details: str = "",
) -> None:
    """Draw bars above the name of the machine.

    Args:
        file: Where to write.
        bars: Value, least and greatest of each bar, by label.
        title: First line.
        machine: The machine, as `turns.machine` describes it.
        details: End of the second line.
    """
    file.write_text(
        svg(bars, title, f"{machine['cpu']}, {', '.join(machine['instructions'])}{details}"), encoding="utf-8"
    )


def spread(rounds: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest over rounds."""
    return median(rounds), min(rounds), max(rounds)


def svg(bars: Mapping[str, tuple[float, float, float]], title: str, under: str) -> str:
    """Draw horizontal bars.

    Args:
        bars: Value, least and greatest of each bar, by label.
        title: First line.
        under: Second line.
    """
    most = max((high for _, _, high in bars.values()), default=1.0)
    scale = WIDTH / max(1.0, most)
    height = HEAD + len(bars) * (BAR + GAP) + GAP
    one = LABEL + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDTH + 80} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="42" fill="#555555">{escape(under)}</text>',
    ]
    for number, (label, (value, low, high)) in enumerate(bars.items()):
        top = HEAD + number * (BAR + GAP)
        middle = top + BAR / 2
        color = "#2a7f62" if value >= 1 else "#b5533c"
        lines += [
            f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{top}" width="{value * scale:.1f}" height="{BAR}" fill="{color}"/>',
            f'<line x1="{LABEL + low * scale:.1f}" x2="{LABEL + high * scale:.1f}" y1="{middle}" y2="{middle}" '
            'stroke="#222222" stroke-width="2"/>',
            f'<text x="{LABEL + high * scale + 8:.1f}" y="{middle + 4}">{value:.2f}</text>',
        ]
    lines += [
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{HEAD - 6}" y2="{height - GAP}" stroke="#555555" '
        'stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
