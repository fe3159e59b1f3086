"""Progress display of long work: a live line on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType

from rich.live import Live
from rich.text import Text

from nxtrain.common.process.console import PipeSafeConsole, standard_error
from nxtrain.common.text import duration

LINE_EVERY_S = 10.0
"""Seconds before the first plain line, and between plain lines."""

REDRAW_S = 1.0
"""Seconds before a live line appears, and between redraws. Frequent redraws would disturb a measurement."""


class Progress:
    """Context that displays progress on standard error; work that ends quickly displays nothing.

    A thread prints, so that the line is updated while the work waits in one long call.

    Args:
        label: Name of the work.
        total: Amount of work; 0 if unknown.
        on_terminals_only: Display nothing outside of a terminal.
        console: Console for the display; by default the console on standard error.
        clock: Clock in seconds.
        line_every_s: Seconds between plain lines.
        redraw_s: Seconds between redraws of a live line.
    """

    def __init__(  # 6 options, all of the display
        self,
        label: str,
        total: float = 0.0,
        *,
        on_terminals_only: bool = False,
        console: PipeSafeConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = LINE_EVERY_S,
        redraw_s: float = REDRAW_S,
    ) -> None:
        self._label, self.total = label, total
        self._done = 0.0
        self._console = console or standard_error()
        self._clock, self._began_s = clock, clock()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._every_s = redraw_s if self._is_live else line_every_s
        self._ended = Event()
        self._thread = Thread(target=self._draw if self._is_live else self._print, name="progress", daemon=True)
        self._is_shown = self._is_live or not on_terminals_only

    def __enter__(self) -> Progress:
        self._began_s = self._clock()
        if self._is_shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._is_shown:
            self._thread.join()

    def show(self, done: float, label: str = "") -> None:
        """Set the amount of finished work, and the label if one is given."""
        self._done, self._label = done, label or self._label

    def line(self) -> str:
        """Progress as one line of text: finished share, elapsed time, and estimated time left."""
        spent_s = self._clock() - self._began_s
        parts = [f"{duration(spent_s)} so far"]
        if self.total and self._done:
            share = min(1.0, self._done / self.total)
            parts = [f"{share:.0%}", *parts, f"about {duration(spent_s / share - spent_s)} left"]
        return f"{self._label}: {', '.join(parts)}"

    def _print(self) -> None:
        while not self._ended.wait(self._every_s):
            self._console.print(self.line(), markup=False)

    def _draw(self) -> None:
        if self._ended.wait(self._every_s):
            return
        with Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            while True:
                live.update(Text(self.line(), overflow="ellipsis", no_wrap=True), refresh=True)
                if self._ended.wait(self._every_s):
                    return
