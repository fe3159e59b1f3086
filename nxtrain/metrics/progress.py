"""Progress display of the leader: a live bar on a terminal, otherwise plain lines at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from nxtrain.metrics.meters import Clock, Pace
from nxtrain.process.console import standard_error

LINE_EVERY_S = 10.0
"""Seconds between plain lines, so that a log of days stays readable."""

_WIDEST_BAR, _NARROWEST_BAR = 20, 5

_VALUES, _LEFT = "loss 1.2345  val 1.2345  12.3k tokens/s", "0:00:00 left"
"""Texts of usual length."""


def open_progress(
    total_steps: int, resume_step: int, *, console: Console | None = None, clock: Clock = time.monotonic
) -> ProgressBar | ProgressLines:
    """Open the display for a console.

    Args:
        total_steps: Last step of the run.
        resume_step: Steps finished before this process began.
        console: Console to draw on; None: standard error, because standard output is for results.
        clock: Seconds, monotonic.
    """
    console = console or standard_error()
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(total_steps, resume_step, console, clock)
    return ProgressLines(total_steps, console, clock)


class ProgressBar:
    """A live bar on one line; other output of the process appears above it.

    A terminal without room for everything gets no elapsed time and a shorter bar or none, because rich would cut the
    numbers instead.
    """

    def __init__(self, total_steps: int, resume_step: int, console: Console, clock: Clock) -> None:
        self._status = _Status(total_steps, clock)
        texts = f"step {total_steps}/{total_steps} {_VALUES} {_LEFT}"
        room = console.width - len(texts) - 1
        columns: list[ProgressColumn] = [TextColumn("step"), MofNCompleteColumn()]
        columns += [BarColumn(bar_width=min(_WIDEST_BAR, room))] if room >= _NARROWEST_BAR else []
        columns += [TextColumn("{task.description}")]
        columns += [TimeElapsedColumn()] if room >= _WIDEST_BAR + len(" 0:00:00") else []
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=console,
            get_time=clock,
            redirect_stdout=sys.stdout.isatty(),  # else the results for a pipe would go to the screen
            refresh_per_second=2,  # the bar shares its cores with the training
        )
        self._task = self._progress.add_task("starting", total=total_steps, completed=resume_step, left="")
        self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Redraw the bar with the values of the record."""
        step, values, left = self._status.read(record)
        self._progress.update(self._task, completed=step, description=values, left=left, refresh=True)

    def close(self) -> None:
        """Stop the redraws; the last state stays on the screen."""
        self._progress.stop()


class ProgressLines:
    """One line for the first and last step, for each evaluation, and every `LINE_EVERY_S` seconds between."""

    def __init__(self, total_steps: int, console: Console, clock: Clock) -> None:
        self._status = _Status(total_steps, clock)
        self._total_steps = total_steps
        self._console = console
        self._clock = clock
        self._next_s = clock()

    def log(self, record: Mapping[str, Any]) -> None:
        """Print the record if a line is due."""
        step, values, left = self._status.read(record)
        now = self._clock()
        if now < self._next_s and step < self._total_steps and "val_loss" not in record:
            return
        self._next_s = now + LINE_EVERY_S
        elapsed = _duration(self._status.pace.elapsed_s())
        line = f"step {step}/{self._total_steps}  {values}  {elapsed} {left}".rstrip()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: no file or display is open."""


class _Status:
    """Texts of both displays: step, values, time left."""

    def __init__(self, total_steps: int, clock: Clock) -> None:
        self.pace = Pace(total_steps, clock=clock)
        self._val_loss: float | None = None

    def read(self, record: Mapping[str, Any]) -> tuple[int, str, str]:
        """Texts for a record; the last held-out loss is shown until the next evaluation."""
        step = int(record["step"] or 0)
        self._val_loss = record.get("val_loss", self._val_loss)
        values = f"loss {record['loss']:.4f}"
        if self._val_loss is not None:
            values += f"  val {self._val_loss:.4f}"
        values += f"  {_short(record['tokens_per_s'] or 0.0)} tokens/s"
        eta_s = self.pace.eta_s(step)
        return step, values, "" if eta_s is None else f"{_duration(eta_s)} left"


def _short(count: float) -> str:
    """Number with three significant digits: 987, 12.3k, 4.56M."""
    for unit in ("", "k", "M"):
        if count < 999.5:  # noqa: PLR2004 - what rounds to 1000 takes the next unit
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
