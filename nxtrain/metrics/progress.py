"""Progress display of rank 0: a live bar on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.process.console import standard_error
from nxtrain.metrics.meters import Clock
from nxtrain.metrics.status import Status, details, duration, fitting

LINE_EVERY_S, LATER_EVERY_S = 10.0, 60.0
"""Seconds between plain lines in the first minutes, and after `LATER_S`, so that long logs stay readable."""
LATER_S = 600.0

LINE_COLUMNS = 100
"""Columns of a plain line, unless the console is wider. A wider line has more metrics."""

_WIDEST_BAR, _NARROWEST_BAR = 20, 5

_ELAPSED = len(" 0:00:00")
"""Columns of the elapsed time."""

_VALUES, _LEFT = "loss 1.2345  val 1.2345  12.3k tokens/s", "0:00:00 left"
"""Sample texts of typical length, from which the width of the bar is computed."""


def open_progress(
    total_steps: int,
    resume_step: int,
    *,
    sizes: BatchSizes = BatchSizes(1),  # noqa: B008 - it is frozen
    console: Console | None = None,
    clock: Clock = time.monotonic,
) -> ProgressBar | ProgressLines:
    """Open the progress display on a console; by default on standard error, since standard output is for results.

    Args:
        total_steps: Steps of the run.
        resume_step: Last finished step before this start.
        sizes: Global batch size of each step; by default all are equal.
        console: Console.
        clock: Clock.
    """
    console = console or standard_error()
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(Status(total_steps, sizes, clock), total_steps, resume_step, console, clock)
    return ProgressLines(Status(total_steps, sizes, clock), total_steps, console, clock)


class ProgressBar:
    """Progress bar on one line of the terminal; other output of the process appears above the bar.

    On a narrow terminal the elapsed time is omitted, and the bar is shorter or omitted. On a narrower one speed,
    held-out loss, remaining time and loss are omitted, in this order. rich would cut the step first.
    """

    def __init__(self, status: Status, total_steps: int, resume_step: int, console: Console, clock: Clock) -> None:
        self._status = status
        self._total_steps = total_steps
        self._console = console
        head = self._head(resume_step)
        room = console.width - len(f"{self._head(total_steps)} {_VALUES} {_LEFT}") - 1
        self._bar = BarColumn(bar_width=min(_WIDEST_BAR, room))
        self._has_bar = room >= _NARROWEST_BAR
        self._has_elapsed = room >= _WIDEST_BAR + _ELAPSED
        columns: list[ProgressColumn] = [TextColumn("{task.fields[head]}")]
        if self._has_bar:
            columns.append(self._bar)
        columns.append(TextColumn("{task.description}"))
        if self._has_elapsed:
            columns.append(TimeElapsedColumn())
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=console,
            get_time=clock,
            redirect_stdout=sys.stdout.isatty(),  # else the results for a pipe would go to the screen
            refresh_per_second=2,  # the bar shares its cores with the training
        )
        self._task = self._progress.add_task("starting", total=total_steps, completed=resume_step, head=head, left="")
        self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Redraw the bar with the values of a record."""
        step, (loss, *others), left = self._status.read(record)
        head = self._head(step)
        room = self._console.width - len(head) - 2  # blanks around the description
        shown: list[str] = []
        for text in (loss, left, *(f"  {other}" for other in others)):  # the most important first
            if len(text) > room:
                break
            room -= len(text)
            shown.append(text)
        values = "".join(shown[:1] + shown[2:])
        left = "".join(shown[1:2])
        if self._has_bar:
            width = max(0, min(_WIDEST_BAR, room - 1))
            self._bar.bar_width = width
            room -= width + 1
        if self._has_elapsed:
            room -= max(_ELAPSED, 1 + len(duration(self._status.elapsed_s())))
            values += fitting(details(record), room)
        self._progress.update(self._task, completed=step, description=values, head=head, left=left, refresh=True)

    def _head(self, step: int) -> str:
        return f"step {step}/{self._total_steps}"

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        self._progress.stop()


class ProgressLines:
    """Progress display that prints one line for the first and last step, each evaluation, and at intervals.

    A line has the most important metrics of its record, in `LINE_COLUMNS` columns.
    """

    def __init__(self, status: Status, total_steps: int, console: Console, clock: Clock) -> None:
        self._status = status
        self._total_steps = total_steps
        self._console = console
        self._clock = clock
        self._next_s = clock()

    def log(self, record: Mapping[str, Any]) -> None:
        """Print a record if a line is due."""
        step, values, left = self._status.read(record)
        now = self._clock()
        if now < self._next_s and step < self._total_steps and "val_loss" not in record:
            return
        elapsed_s = self._status.elapsed_s()
        self._next_s = now + LINE_EVERY_S
        if elapsed_s >= LATER_S:
            self._next_s = now + LATER_EVERY_S
        head = "  ".join([f"step {step}/{self._total_steps}", *values])
        tail = f"  {duration(elapsed_s)} {left}".rstrip()
        line = head + fitting(details(record), max(LINE_COLUMNS, self._console.width) - len(head) - len(tail)) + tail
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing, since no file or display is open."""
