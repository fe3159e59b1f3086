"""Text for messages, tables and charts: durations, sizes, short numbers, and the first of many values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHOWN = 12
"""Default maximum number of values that a message lists."""

_FEW_S = 0.01
"""Seconds below which a duration is formatted with two significant digits."""


def listed(values: Iterable[object], most: int = SHOWN) -> str:
    """Format the first values in one line, with the number of further values: `1, 2 and 3 more`."""
    texts = [str(value) for value in values]
    text = ", ".join(texts[:most])
    if len(texts) > most:
        text += f" and {len(texts) - most:,} more"
    return text


def indented(lines: Sequence[str], most: int = SHOWN) -> str:
    """Format the first lines, indented below a message, with the number of further lines on a line of its own."""
    shown = list(lines[:most])
    if len(lines) > most:
        shown.append(f"and {len(lines) - most:,} more")
    return "".join(f"\n    {line}" for line in shown)


def duration(seconds: float) -> str:
    """Format a duration with two or three digits and its unit: 2.5 min, 1.5 s, 20 ms."""
    for unit, unit_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    if seconds >= 1 or not seconds:
        return f"{seconds:.1f} s"
    if seconds >= _FEW_S:
        return f"{1e3 * seconds:.0f} ms"
    return f"{1e3 * seconds:.2g} ms"


def size(num_bytes: float) -> str:
    """Format a number of bytes with a binary unit: 512 B, 3.25 GiB."""
    unit_bytes = 1024
    if num_bytes < unit_bytes:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= unit_bytes
        if num_bytes < unit_bytes:
            return f"{num_bytes:.2f} {unit}"
    return f"{num_bytes / unit_bytes:.2f} TiB"


def short(value: float) -> str:
    """Format a number with up to four digits: 0.0312, 4.382, 12.3k, 4.56M."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if not 1e-4 <= magnitude < 1e15:  # noqa: PLR2004 - powers of ten read better outside
        return f"{value:.3g}".replace("e-0", "e-").replace("e+", "e")
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        lowest = 9.9995 if unit == "k" else 0.9995
        if magnitude >= lowest * factor:
            return f"{value / factor:.3g}{unit}"
    if magnitude >= 1000:  # noqa: PLR2004 - where a thousand begins
        return f"{value:,.0f}"
    return f"{value:.4g}"
