"""SVG elements as text: words, lines, boxes and curves, and a picture with white background."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

INK = "#24292f"
GRID = "#d0d7de"
PAPER = "#ffffff"


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """Build an SVG picture from elements; width and height are in pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *parts, "</svg>", ""])


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 13,
    color: str = INK,
) -> str:
    """Text element whose baseline starts, ends or is centered at a point."""
    style = f'fill="{color}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, color: str = GRID, width: int = 1, dashed: bool = False) -> str:
    """Straight line element."""
    dashes = ""
    if dashed:
        dashes = ' stroke-dasharray="4 3"'
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"{dashes}/>'


def curve(points: Iterable[tuple[float, float]], color: str) -> str:
    """Polyline element through the given points."""
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{listed}" fill="none" stroke="{color}" stroke-width="2"/>'


def dot(x: float, y: float, color: str) -> str:
    """Filled circle element."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """Filled rectangle element."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def boxes(rectangles: Iterable[tuple[float, float, float, float]], color: str) -> str:
    """One path element with many filled rectangles (x, y, width, height) of the same color."""
    outline = "".join(f"M{x:.1f} {y:.0f}h{width:.1f}v{height:.0f}h-{width:.1f}z" for x, y, width, height in rectangles)
    return f'<path d="{outline}" fill="{color}"/>'


def path(x: Sequence[float], y: Sequence[float], digits: int = 2) -> str:
    """Path data, the attribute `d`, of a polyline through the given points."""
    return "M" + "L".join(f"{a:.{digits}f} {b:.{digits}f}" for a, b in zip(x, y, strict=True))


def legend(names: Sequence[tuple[str, str]], right: float, y: float) -> list[str]:
    """Legend elements in one line, right-aligned at `right`: each name with its color."""
    parts = []
    x = right
    for name, color in reversed(names):
        x -= 7.2 * len(name)
        parts.append(text(x, y, name))
        x -= 18
        parts.append(box(x, y - 11, 12, 12, color))
        x -= 16
    return parts
