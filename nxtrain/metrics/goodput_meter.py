"""Counts where the time of a run goes, as the run tells what it does.

On devices that compute behind the host, a step that is not logged counts as finished when it is queued. What a start
that was killed did after it last left word, and how long it took to notice that it was gone, counts as restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nxtrain.metrics.goodput import Goodput, Spent, Start, account, standing
from nxtrain.metrics.goodput_log import GoodputLog, read
from nxtrain.process.clock import Instant, now

REFRESH_S = 1.0
"""Between words that are left while nothing is logged."""

PAUSES = {"evaluation": "eval_s", "checkpoint": "stall_s"}
"""Work of a run that is no training, and where its time is counted."""


@dataclass
class GoodputMeter:
    """Counts the time of a run into its folder; the leader has one.

    Args:
        logs: Folder of the files.
        told: Takes lines for people.
        began: When this process was started; None: when it begins to train.
        clock: Gives the moment.
    """

    logs: Path
    told: Callable[[str], None] = lambda line: None
    began: Instant | None = None
    clock: Callable[[], Instant] = now
    _log: GoodputLog = field(init=False)
    _past: list[Start] = field(default_factory=list, init=False)
    _start: Start | None = field(default=None, init=False)
    _section: str = field(default="train_s", init=False)
    _settled: float = field(default=0.0, init=False)
    _next_beat: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._log = GoodputLog(self.logs)

    def begin(self, resumed: int) -> None:
        """Note a start, which goes on after a step."""
        self._past = read(self.logs)
        present = self.clock()
        began = self.began or present
        if self._past:
            last = self._past[-1]
            if not last.outcome:
                last = self._past[-1] = replace(last, outcome="killed")
                self._log.add("end", last)
            if began.boot and began.boot == last.seen.boot and began.up < last.seen.up:
                began = last.seen  # one process that started a run twice
        self._settled = began.up
        self._start = Start(resumed, began, present, Spent(resumed))
        # Where earlier starts stand is known from here on, and all that is asked of their courses.
        stands = zip(self._past, standing([*self._past, self._start])[:-1], strict=True)
        self._past = [replace(past, course=((stood, past.train_s(stood)),)) for past, stood in stands]
        self._log.add("start", self._start)

    def enter(self, step: int, work: str) -> None:
        """Begin some work; an evaluation and a checkpoint come after their step."""
        if self._start is not None and work in PAUSES:
            self._finish(step)
            self._settle()
            self._section = PAUSES[work]
            if work == "checkpoint":
                self._start = self._start.with_save()

    def finish(self, step: int) -> None:
        """Note that a step is finished, and all that follows it; the next one begins."""
        if self._start is None:
            return
        saved = self._section == "stall_s"
        self._finish(step)
        self._settle()
        self._section = "train_s"
        if saved:
            self._leave()

    def log(self, step: int) -> float:
        """Note that a step is finished and that its results were read; the goodput so far."""
        if self._start is None:
            return 0.0
        self.finish(step)
        self._leave()
        return self.read().goodput

    def saved(self, stall_s: float, write_s: float) -> None:
        """Note that a checkpoint was committed.

        Args:
            stall_s: What training waited for it.
            write_s: What it took to be written after that.
        """
        if self._start is not None:
            spent = self._start.spent
            self._spend(
                saves=spent.saves + 1,
                save_stall_s=spent.save_stall_s + stall_s,
                save_write_s=spent.save_write_s + write_s,
            )

    def beat(self) -> None:
        """Leave what is known now for whoever comes after; written once in a while, from any thread."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + REFRESH_S
            self._leave()

    def end(self, outcome: str) -> None:
        """Note the end: `done`, `stopped` or `failed`."""
        if self._start is None:
            return
        if outcome != "failed" and self._section in PAUSES.values():
            self._settle()
        self._start = replace(self._start, outcome=outcome, seen=self.clock())
        found = self.read()
        self._log.add("end", self._start, found.record())
        if outcome != "failed":  # of which the next start tells
            self.told(str(found))

    def read(self) -> Goodput:
        """Where the time went, up to now."""
        present = self._seen() or self._start
        return account([*self._past, *([present] if present else [])])

    def _finish(self, step: int) -> None:
        """Count the time since the last progress as that of a step."""
        assert self._start is not None
        first = self._start.spent.step == self._start.resumed
        if step == self._start.spent.step:
            return
        self._section = "start_s" if first else "train_s"
        self._spend(step=step)
        self._settle()
        if first and self._past:
            self.told(str(self.read()))

    def _settle(self) -> None:
        """Count the time since the last progress to the present section."""
        assert self._start is not None
        if self._start.spent.step > self._start.resumed:
            up = self.clock().up
            self._spend(**{self._section: getattr(self._start.spent, self._section) + up - self._settled})
            self._settled = up

    def _spend(self, **changed: Any) -> None:
        assert self._start is not None
        self._start = replace(self._start, spent=replace(self._start.spent, **changed))

    def _leave(self) -> None:
        self._log.replace(self._seen)

    def _seen(self) -> Start | None:
        """The present start up to now; None: there is none any more."""
        start = self._start
        return replace(start, seen=self.clock()) if start and not start.outcome else None
