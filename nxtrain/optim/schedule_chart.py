"""Text chart of the learning rate schedule over a run."""

from __future__ import annotations

from nxtrain.optim.schedule import Schedule

WIDTH, HEIGHT = 72, 12
"""Maximum columns and rows of the chart, without its labels."""


def draw(schedule: Schedule, steps: int) -> str:
    """Draw the learning rates of the updates 1 to `steps`, and list the pieces below the chart."""
    at = sampled(steps)
    rates = [schedule.at(step) for step in at]
    top = max(rates) or 1.0
    rows = [round(rate / top * (HEIGHT - 1)) for rate in rates]
    lines = []
    for row in reversed(range(HEIGHT)):
        label = ""
        if row in (0, HEIGHT // 2, HEIGHT - 1):
            label = f"{top * row / (HEIGHT - 1):.3g}"
        marks = "".join("*" if row == of_column else " " for of_column in rows)
        lines.append(f"{label:>9} |{marks}".rstrip())
    last = f"{steps:,}"
    lines.append(f"{'':>9} +{'-' * len(at)}")
    lines.append(f"{'step':>9}  1{last:>{max(len(at) - 1, len(last) + 1)}}")
    return "\n".join([*lines, schedule.describe()])


def sampled(steps: int) -> list[int]:
    """Updates shown in the chart's columns: the first, the last, and others at equal distances."""
    columns = min(WIDTH, steps)
    if columns == 1:
        return [1]
    return [1 + round(column * (steps - 1) / (columns - 1)) for column in range(columns)]
