"""Timeline of a run's starts: use of time in each start, gaps between starts, and the reason why each ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nxtrain.common.text import duration
from nxtrain.metrics.goodput import RunStart, standing
from nxtrain.tools.report.chart import WIDTH
from nxtrain.tools.report.run import shortened

USES = {
    "productive": "steps that count",
    "lost": "steps that a later start repeated",
    "begin": "start-up until the first step",
    "pause": "checkpoints and evaluations",
    "tail": "from the last progress to the end",
    "gap": "no start was running",
}
"""Uses of time in the timeline, in the order of the legend."""

MOST_SPANS = 400  # maximum number of spans drawn one by one; otherwise they are summed into columns
COLUMNS = 250  # number of columns into which spans are summed
MOST_ROWS = 60  # maximum number of starts in the table; the first and the last ones


@dataclass(frozen=True)
class UseSpan:
    """Time span of a run with one use of time."""

    use: str  # key of `USES`
    begin_s: float  # seconds since the run's first start
    end_s: float
    start: int  # number of the start, from 1; for a gap, the number of the start before it


def timeline(starts: Sequence[RunStart]) -> dict[str, Any] | None:
    """Timeline of a run's starts, as data for the HTML template; None if the starts took no time.

    Returns:
        `boxes`: rectangles in units of `WIDTH` across and percent down. `restarts`: positions where later starts begin.
        `rows`: table of starts.
    """
    spans = list(spans_of(starts))
    total_s = max((span.end_s for span in spans), default=0.0)
    if not total_s > 0:
        return None
    added_up = len(spans) > MOST_SPANS
    boxes: list[dict[str, Any]] = []
    restarts: list[float] = []
    if added_up:
        boxes += _columns(spans, total_s)
    else:
        for span in spans:
            x, width = WIDTH * span.begin_s / total_s, WIDTH * (span.end_s - span.begin_s) / total_s
            text = f"start {span.start}: {USES[span.use]}, {duration(span.end_s - span.begin_s)}"
            box = {"use": span.use, "x": round(x, 2), "width": round(width, 2), "y": 0, "height": 100, "text": text}
            boxes.append(box)
        for before, span in pairwise(spans):
            if span.start != before.start:
                restarts.append(round(WIDTH * span.begin_s / total_s, 2))
    return {
        "boxes": boxes,
        "restarts": restarts,
        "total": duration(total_s),
        "ticks": [(25 * part, duration(total_s * part / 4)) for part in range(5)],
        "rows": list(_rows(starts)),
        "added_up": added_up,
    }


def spans_of(starts: Sequence[RunStart]) -> Iterator[UseSpan]:
    """Yield the time spans of all starts, without holes between them.

    The log has only the sum of each use of time per start. So the uses of a start are drawn in a fixed order, not in
    their order in time.
    """
    at = 0.0
    before: RunStart | None = None
    for number, (start, stood) in enumerate(zip(starts, standing(starts), strict=True), 1):
        if before is not None and before.outcome != "done":
            gap_s = start.began.since(before.seen)
            if gap_s > 0:
                yield UseSpan("gap", at, at + gap_s, number - 1)
                at += gap_s
        spent, elapsed_s = start.spent, start.seen.up - start.began.up
        begin_s, tail_s = spent.start_s, max(0.0, elapsed_s - spent.total_s)
        if spent.step == start.resumed and start.outcome not in {"done", "stopped"}:  # no step: only start-up
            begin_s, tail_s = begin_s + tail_s, 0.0
        productive_s = start.train_s(stood)
        uses_s = {
            "begin": begin_s,
            "productive": productive_s,
            "pause": spent.eval_s + spent.stall_s,
            "lost": spent.train_s - productive_s,
            "tail": tail_s,
        }
        for use, length_s in uses_s.items():
            if length_s > 0:
                yield UseSpan(use, at, at + length_s, number)
                at += length_s
        before = start


def _columns(spans: Sequence[UseSpan], total_s: float) -> Iterator[dict[str, Any]]:
    """Yield boxes of columns of equal width, with the shares of all uses in each, productive time at the bottom."""
    sums = [dict.fromkeys(USES, 0.0) for _ in range(COLUMNS)]
    width_s = total_s / COLUMNS
    for span in spans:
        begin, column = span.begin_s, min(COLUMNS - 1, int(span.begin_s / width_s))
        while begin < span.end_s and column < COLUMNS:
            end = span.end_s
            if column < COLUMNS - 1:
                end = min(end, (column + 1) * width_s)
            sums[column][span.use] += max(0.0, end - begin)
            begin, column = end, column + 1
    for column, shares in enumerate(sums):
        bottom, whole = 100.0, sum(shares.values()) or 1.0
        for use, length_s in shares.items():
            height = 100 * length_s / whole
            bottom -= height
            if height > 0:
                box = {"use": use, "x": WIDTH * column / COLUMNS, "width": WIDTH / COLUMNS}
                yield {**box, "y": round(bottom, 2), "height": round(height, 2), "text": ""}


def _rows(starts: Sequence[RunStart]) -> Iterator[tuple[str, ...]]:
    half = MOST_ROWS // 2
    hidden = range(half, len(starts) - half)  # empty for few starts
    stands = standing(starts)
    for index, start in enumerate(starts):
        if index in hidden:
            if index == hidden.start:
                yield "\u2026", "", "", "", "", "", f"{len(hidden):,} starts in between are not listed"
            continue
        yield (
            f"{index + 1:,}",
            f"{start.resumed:,}",
            f"{start.spent.step:,}",
            f"{start.spent.step - stands[index]:,}",
            duration(max(0.0, start.seen.up - start.began.up)),
            start.outcome or "no end yet",
            shortened(start.stop or start.why, 300) or "",
        )
