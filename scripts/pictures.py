"""Draw the pictures of docs/images from real runs and a real pipeline.

`python scripts/pictures.py loss RUN` reads RUN/metrics.jsonl, and `overlap RUN` the profiles of RUN. `pipeline`
measures four processes that sleep, as `nxtrain bench pipeline` does, under 1F1B and under zero_bubble. Each writes one
SVG file, by hand, without a drawing library.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.common.io import jsonl

if TYPE_CHECKING:
    from nxtrain.parallel.simulate import Span
    from nxtrain.tools.bench.overlap import Interval, Profile

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 760
INK = "#24292f"
GRID = "#d0d7de"
PAPER = "#ffffff"
FORWARD_S = 0.2
"""Forward of a stage that sleeps: long enough that a busy machine hardly shows."""
COLORS = {"forward": "#4c8dd6", "backward": "#e08a3c", "weight": "#8a8f98"}
SECTION_COLORS = {"forward": "#4c8dd6", "backward": "#e08a3c", "reduce": "#8a8f98", "optimizer": "#8f6bb3"}
SUM_COLOR = "#3a9d6e"


def main() -> None:
    """Draw the picture that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("loss", "overlap", "pipeline"))
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder, for loss and overlap")
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="by default docs/images/PICTURE.svg")
    options = parser.parse_args()
    if options.picture != "pipeline" and options.run is None:
        parser.error(f"{options.picture} needs RUN, a run folder")
    if options.picture == "overlap":
        from nxtrain.tools.bench.overlap import read_profiles

        svg = overlaps(read_profiles(options.run))
    elif options.picture == "loss":
        records = jsonl.read(options.run / "metrics.jsonl")
        if not records:
            parser.error(f"{options.run} has no metrics.jsonl with records")
        svg = loss_curve(records)
    else:
        svg = pipelines(_measured())
    out = options.out or IMAGES / f"{options.picture}.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg, encoding="utf-8")
    print(f"{out}: {len(svg)} bytes")


def loss_curve(records: Sequence[dict[str, float]]) -> str:
    """SVG of training and held-out loss over steps.

    Args:
        records: Lines of metrics.jsonl, with `step`, `loss` and, after an evaluation, `val_loss`.
    """
    left = 56
    top = 40
    height = 220
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss") is not None]
    values = [value for _, value in (*train, *held_out)]
    low, high = math.floor(min(values)), math.ceil(max(values))
    last = max(step for step, _ in train)

    def position(step: float, value: float) -> tuple[float, float]:
        x = left + (WIDTH - left - 24) * step / last
        return x, top + height * (high - value) / (high - low)

    parts = [_text(left, 22, "loss (nats per token)", weight="bold")]
    for value in range(low, high + 1):
        x, y = position(0, value)
        parts += [_line(x, y, WIDTH - 24, y), _text(left - 8, y + 4, str(value), anchor="end")]
    for quarter in range(5):
        step = round(last * quarter / 4)
        parts.append(_text(position(step, low)[0], top + height + 18, str(step), anchor="middle"))
    parts.append(_text(WIDTH - 24, top + height + 36, "step", anchor="end"))
    points = []
    for at, loss in train:
        x, y = position(at, loss)
        points.append(f"{x:.1f},{y:.1f}")
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLORS["forward"]}" stroke-width="2"/>')
    names = [("training", COLORS["forward"])]
    if held_out:
        names.append(("held-out text", COLORS["backward"]))
    for at, loss in held_out:
        x, y = position(at, loss)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLORS["backward"]}"/>')
    return _svg(top + height + 48, [*parts, *_legend(names, 22)])


def pipelines(steps: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """SVG of pipeline steps below each other, on one scale of time: a row for each rank, a box for each computation.

    Args:
        steps: Title and computations of each.
    """
    left = 56
    row = 26
    gap = 34
    begin_s, lengths_s = [], []
    kinds = set()
    for _, spans in steps:
        begin_s.append(min(span.start_s for span in spans))
        lengths_s.append(max(span.end_s for span in spans) - begin_s[-1])
        kinds |= {span.action.kind for span in spans}
    scale = (WIDTH - left - 8) / max(lengths_s)
    parts, y = list[str](), 30.0
    for (title, spans), begin in zip(steps, begin_s, strict=True):
        parts.append(_text(left, y + gap - 14, title, weight="bold"))
        y += gap
        ranks = 1 + max(span.rank for span in spans)
        parts += [_text(left - 8, y + rank * row + 16, f"rank {rank}", anchor="end") for rank in range(ranks)]
        for kind, color in COLORS.items():
            boxes, labels = list[str](), list[str]()
            for span in spans:
                if span.action.kind != kind:
                    continue
                x, above = left + (span.start_s - begin) * scale, y + span.rank * row
                width = (span.end_s - span.start_s) * scale
                boxes.append(f"M{x:.1f} {above:.0f}h{width - 0.5:.1f}v22h-{width - 0.5:.1f}z")
                labels.append(f'<text x="{x + width / 2:.1f}" y="{above + 15:.0f}">{span.action.micro}</text>')
            if boxes:
                parts.append(f'<path d="{"".join(boxes)}" fill="{color}"/>')
                parts.append(f'<g fill="{PAPER}" font-size="11" text-anchor="middle">{"".join(labels)}</g>')
        y += ranks * row
    legend = [
        (name, COLORS[kind])
        for kind, name in (("forward", "forward"), ("backward", "backward"), ("weight", "weight gradients"))
        if kind in kinds
    ]
    return _svg(round(y) + 12, [*_legend(legend, 18), *parts])


def overlaps(profiles: Sequence[Profile]) -> str:
    """SVG of a step of several ranks on one scale of time: its sections, and below them the sums of gradients.

    Args:
        profiles: One of each rank.
    """
    left = 56
    height = 22
    lane = 8
    gap = 40
    drawn = []
    for profile in profiles:
        drawn += [when for _, when in profile.sections]
    begin_s, end_s = min(when.begin_s for when in drawn), max(when.end_s for when in drawn)
    scale = (WIDTH - left - 8) / (end_s - begin_s)

    def boxes(intervals: Iterable[tuple[Interval, float]], tall: int, color: str) -> str:
        rectangles = []
        for when, y in intervals:
            x = left + (when.begin_s - begin_s) * scale
            width = max(0.5, (when.end_s - when.begin_s) * scale - 0.5)
            rectangles.append(f"M{x:.1f} {y:.0f}h{width:.1f}v{tall}h-{width:.1f}z")
        return f'<path d="{"".join(rectangles)}" fill="{color}"/>'

    parts, y = list[str](), 30.0
    for profile in profiles:
        title = (
            f"rank {profile.rank}: {len(profile.sums)} sums start in the backward pass, which computes products "
            f"for {profile.overlap:.0%} of their time"
        )
        parts.append(_text(left, y + gap - 14, title))
        y += gap
        for name, color in SECTION_COLORS.items():
            parts.append(boxes(((when, y) for section, when in profile.sections if section == name), height, color))
        y += height + 3
        lanes = _lanes(profile.sums)
        parts.append(boxes(((when, y + lane * number) for when, number in lanes), lane - 1, SUM_COLOR))
        y += lane * (1 + max(number for _, number in lanes))
    milliseconds = 1e3 * (end_s - begin_s)
    parts.append(_text(left, y + 22, f"0 to {milliseconds:.0f} ms"))
    legend = [*SECTION_COLORS.items(), ("sum of gradients", SUM_COLOR)]
    return _svg(round(y) + 32, [*_legend(legend, 18), *parts])


def _lanes(intervals: Sequence[Interval]) -> list[tuple[Interval, int]]:
    """Intervals, each in the first lane that is free at its begin."""
    ends_s: list[float] = []
    lanes = []
    for interval in intervals:
        free = [number for number, end_s in enumerate(ends_s) if end_s <= interval.begin_s]
        lane = min(free, default=len(ends_s))
        ends_s[lane : lane + 1] = [interval.end_s]
        lanes.append((interval, lane))
    return lanes


def _measured() -> list[tuple[str, list[Span]]]:
    """The shortest of five steps of four stages under each schedule, and its bubble."""
    from nxtrain.plan.pipeline import computations, figures
    from nxtrain.tools.bench.pipeline import StageWork, fastest, measure

    works = [StageWork(4, 1, order, 8, "sleep", FORWARD_S, 1, 32) for order in ("1f1b", "zero_bubble")]
    steps = []
    for work, turns in zip(works, measure(works, rounds=5), strict=True):
        spans = fastest(work, turns).spans
        result = figures(work.expected(), spans)
        name = {"1f1b": "1F1B", "zero_bubble": "zero_bubble"}[work.schedule]
        title = f"{name}: {1e3 * result.step_s:.0f} ms, of which ranks wait {result.bubble:.0%}"
        steps.append((title, computations(spans)))
    return steps


def _svg(height: int, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{INK}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}"/>'


def _legend(names: Sequence[tuple[str, str]], y: float) -> list[str]:
    """Names with their colors, right-aligned in the first line."""
    parts, x = list[str](), WIDTH - 24.0
    for name, color in reversed(names):
        x -= 7.2 * len(name)
        parts.append(_text(x, y, name))
        x -= 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="12" height="12" fill="{color}"/>')
        x -= 16
    return parts


if __name__ == "__main__":
    main()
