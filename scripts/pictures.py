"""Draw the pictures of docs/images from real runs and a real pipeline.

`python scripts/pictures.py loss RUN` reads RUN/metrics.jsonl, and `overlap RUN` reads the profiles of RUN. `held_out
RUN...` compares the held-out losses of several runs, by the names of their folders. `pipeline` measures four processes
that sleep, like `nxtrain bench pipeline`, with the schedules 1F1B and zero_bubble. Each command writes one SVG file.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.common.io import jsonl
from nxtrain.tools import svg

if TYPE_CHECKING:
    from nxtrain.parallel.simulate import Span
    from tests.support.overlap import Interval, Profile

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 760
LEFT = 56
"""Width of the labels at the left border, in pixels."""
RIGHT = WIDTH - 24
FORWARD_S = 0.2
"""Seconds of a sleeping stage's forward pass, long enough that the load of the machine is negligible."""
COLORS = {"forward": "#4c8dd6", "backward": "#e08a3c", "weight": "#8a8f98"}
SECTION_COLORS = {"forward": "#4c8dd6", "backward": "#e08a3c", "reduce": "#8a8f98", "optimizer": "#8f6bb3"}
SUM_COLOR = "#3a9d6e"
CURVE_COLORS = ("#4c8dd6", "#8a8f98", "#e08a3c", "#3a9d6e", "#8f6bb3")


def main() -> None:
    """Parse the command line, and draw the requested picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("loss", "held_out", "overlap", "pipeline"))
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder, or several for held_out")
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="by default docs/images/PICTURE.svg")
    options = parser.parse_args()
    if options.picture != "pipeline" and not options.runs:
        parser.error(f"{options.picture} needs RUN, a run folder")
    if options.picture == "overlap":
        from tests.support.overlap import read_profiles

        drawn = overlaps(read_profiles(options.runs[0]))
    elif options.picture == "loss":
        records = jsonl.read(options.runs[0] / "metrics.jsonl")
        if not records:
            parser.error(f"{options.runs[0]} has no metrics.jsonl with records")
        drawn = loss_curve(records)
    elif options.picture == "held_out":
        drawn = held_out_curves({run.name: jsonl.read(run / "metrics.jsonl") for run in options.runs})
    else:
        drawn = pipelines(_measured())
    out = options.out or IMAGES / f"{options.picture}.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(drawn, encoding="utf-8")
    print(f"{out}: {len(drawn)} bytes")


def loss_curve(records: Sequence[dict[str, float]]) -> str:
    """Draw training and held-out loss over steps as SVG.

    Args:
        records: Lines of metrics.jsonl, with `step`, `loss` and, after an evaluation, `val_loss`.
    """
    top = 40
    height = 220
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss") is not None]
    values = [value for _, value in (*train, *held_out)]
    low, high = math.floor(min(values)), math.ceil(max(values))
    last = max(step for step, _ in train)

    def position(step: float, value: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * step / last, top + height * (high - value) / (high - low)

    parts = [svg.text(LEFT, 22, "loss (nats per token)", weight="bold")]
    for value in range(low, high + 1):
        x, y = position(0, value)
        parts += [svg.line(x, y, RIGHT, y), svg.text(LEFT - 8, y + 4, str(value), anchor="end")]
    for quarter in range(5):
        step = round(last * quarter / 4)
        x, y = position(step, low)
        parts.append(svg.text(x, y + 18, str(step), anchor="middle"))
    parts.append(svg.text(RIGHT, top + height + 36, "step", anchor="end"))
    parts.append(svg.curve((position(step, loss) for step, loss in train), COLORS["forward"]))
    names = [("training", COLORS["forward"])]
    if held_out:
        names.append(("held-out text", COLORS["backward"]))
    for step, loss in held_out:
        parts.append(svg.dot(*position(step, loss), COLORS["backward"]))
    return svg.picture(WIDTH, top + height + 48, [*parts, *svg.legend(names, RIGHT, 22)])


def held_out_curves(runs: Mapping[str, Sequence[dict[str, float]]]) -> str:
    """Draw the held-out loss of several runs over steps as SVG.

    Args:
        runs: Lines of metrics.jsonl by the name of the run; lines with `val_loss` are drawn.
    """
    top, height, tick = 40, 260, 0.2
    curves = {}
    for name, records in runs.items():
        curves[name] = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss")]
    losses = [loss for points in curves.values() for _, loss in points]
    steps = [step for points in curves.values() for step, _ in points]
    low, high = math.floor(min(losses) / tick), math.ceil(max(losses) / tick)
    first, last = min(steps), max(steps)

    def position(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * (step - first) / (last - first)
        return x, top + height * (high - loss / tick) / (high - low)

    parts = [svg.text(LEFT, 22, "held-out loss (nats per token)", weight="bold")]
    for number in range(low, high + 1):
        x, y = position(first, number * tick)
        parts += [svg.line(x, y, RIGHT, y), svg.text(LEFT - 8, y + 4, f"{number * tick:.1f}", anchor="end")]
    for step in sorted({*steps}):
        x, y = position(step, low * tick)
        parts.append(svg.text(x, y + 18, str(step), anchor="middle"))
    parts.append(svg.text(RIGHT, top + height + 36, "step", anchor="end"))
    names = []
    for (name, points), color in zip(curves.items(), CURVE_COLORS, strict=False):
        names.append((name, color))
        parts.append(svg.curve((position(step, loss) for step, loss in points), color))
    return svg.picture(WIDTH, top + height + 48, [*parts, *svg.legend(names, RIGHT, 22)])


def pipelines(steps: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """Draw pipeline steps below each other on one time scale as SVG, with a row per rank and a box per computation.

    Args:
        steps: Title and computations of each step.
    """
    row = 26
    gap = 34
    begins_s = []
    lengths_s = []
    kinds = set()
    for _, spans in steps:
        begins_s.append(min(span.start_s for span in spans))
        lengths_s.append(max(span.end_s for span in spans) - begins_s[-1])
        kinds |= {span.action.kind for span in spans}
    scale = (WIDTH - LEFT - 8) / max(lengths_s)
    parts = []
    y = 30
    for (title, spans), begin_s in zip(steps, begins_s, strict=True):
        parts.append(svg.text(LEFT, y + gap - 14, title, weight="bold"))
        y += gap
        ranks = 1 + max(span.rank for span in spans)
        parts += [svg.text(LEFT - 8, y + rank * row + 16, f"rank {rank}", anchor="end") for rank in range(ranks)]
        for kind, color in COLORS.items():
            boxes = []
            labels = []
            for span in spans:
                if span.action.kind != kind:
                    continue
                x = LEFT + (span.start_s - begin_s) * scale
                top = y + span.rank * row
                width = (span.end_s - span.start_s) * scale
                boxes.append((x, top, width - 0.5, 22))
                micro = str(span.action.micro)
                labels.append(svg.text(x + width / 2, top + 15, micro, anchor="middle", size=11, color=svg.PAPER))
            if boxes:
                parts += [svg.boxes(boxes, color), *labels]
        y += ranks * row
    names = {"forward": "forward", "backward": "backward", "weight": "weight gradients"}
    legend = [(name, COLORS[kind]) for kind, name in names.items() if kind in kinds]
    return svg.picture(WIDTH, y + 12, [*svg.legend(legend, RIGHT, 18), *parts])


def overlaps(profiles: Sequence[Profile]) -> str:
    """Draw a step of several ranks on one time scale as SVG: its sections, and the gradient reductions below them.

    Args:
        profiles: Profile of each rank.
    """
    height = 22
    lane = 8
    gap = 40
    drawn = []
    for profile in profiles:
        drawn += [interval for _, interval in profile.sections]
    begin_s, end_s = min(begin for begin, _ in drawn), max(end for _, end in drawn)
    scale = (WIDTH - LEFT - 8) / (end_s - begin_s)

    def box(interval: Interval, y: float, tall: int) -> tuple[float, float, float, float]:
        begin, end = interval
        return LEFT + (begin - begin_s) * scale, y, max(0.5, (end - begin) * scale - 0.5), tall

    parts = []
    y = 30
    for profile in profiles:
        title = (
            f"rank {profile.rank}: {len(profile.sums)} sums start in the backward pass, which computes products "
            f"for {profile.overlap:.0%} of their time"
        )
        parts.append(svg.text(LEFT, y + gap - 14, title))
        y += gap
        for name, color in SECTION_COLORS.items():
            sections = [interval for section, interval in profile.sections if section == name]
            parts.append(svg.boxes([box(interval, y, height) for interval in sections], color))
        y += height + 3
        lanes = _lanes(profile.sums)
        parts.append(svg.boxes([box(interval, y + lane * number, lane - 1) for interval, number in lanes], SUM_COLOR))
        y += lane * (1 + max(number for _, number in lanes))
    parts.append(svg.text(LEFT, y + 22, f"0 to {1e3 * (end_s - begin_s):.0f} ms"))
    legend = [*SECTION_COLORS.items(), ("sum of gradients", SUM_COLOR)]
    return svg.picture(WIDTH, y + 32, [*svg.legend(legend, RIGHT, 18), *parts])


def _lanes(intervals: Sequence[Interval]) -> list[tuple[Interval, int]]:
    """Assign each interval to the first row of the drawing that is free at its beginning."""
    ends_s: list[float] = []
    lanes = []
    for interval in intervals:
        begin_s, end_s = interval
        free = [number for number, busy_s in enumerate(ends_s) if busy_s <= begin_s]
        lane = min(free, default=len(ends_s))
        ends_s[lane : lane + 1] = [end_s]
        lanes.append((interval, lane))
    return lanes


def _measured() -> list[tuple[str, list[Span]]]:
    """Measure a pipeline of four stages with each schedule; return a title and the fastest of five steps."""
    from nxtrain.plan.pipeline import computations, figures
    from nxtrain.tools.bench.pipeline import StageWork, fastest, measure

    works = [StageWork(4, 1, order, 8, FORWARD_S, 32) for order in ("1f1b", "zero_bubble")]
    steps = []
    for work, turns in zip(works, measure(works, rounds=5), strict=True):
        spans = fastest(work, turns).spans
        result = figures(work.expected(), spans)
        name = {"1f1b": "1F1B", "zero_bubble": "zero_bubble"}[work.schedule]
        title = f"{name}: {1e3 * result.step_s:.0f} ms, of which ranks wait {result.bubble:.0%}"
        steps.append((title, computations(spans)))
    return steps


if __name__ == "__main__":
    sys.path.insert(0, str(IMAGES.parents[1]))  # for the reader of profiles, which the tests have
    main()
