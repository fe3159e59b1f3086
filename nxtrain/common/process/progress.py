"""Progress of work that takes more than seconds: a live line on a terminal, elsewhere lines at intervals."""

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
"""Seconds until the first plain line, and between two lines."""

REDRAW_S = 1.0
"""Seconds until a live line appears, and between redraws, which must not disturb a measurement."""


class Progress:
    """Progress on standard error within a context; short work shows nothing.

    A thread prints, so that the line also goes on while the work waits for one long call. A total of 0 is unknown.
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
        """Set the amount of finished work and, if given, the label of the work under way."""
        self._done, self._label = done, label or self._label

    def line(self) -> str:
        """State in one line: share, time so far, and time left at the speed so far."""
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
