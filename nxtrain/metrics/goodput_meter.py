"""Meter that measures the time of a run's current start, and the goodput of all starts.

On asynchronous devices, a step that is not logged counts as finished when it is queued. For a killed start, the time
after its last record counts as restart. That is its last work, and the time until its end was detected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nxtrain.common.process.clock import Instant, now
from nxtrain.metrics.goodput import Goodput, RunStart, TimeSpent, account, standing
from nxtrain.metrics.run_observer import Outcome, RunObserver, Work
from nxtrain.metrics.start_log import REFRESH_S, StartLog, read

PAUSES = {"evaluation": "eval_s", "checkpoint": "stall_s"}
"""Kinds of work other than training, with the field of `TimeSpent` that counts their time."""

RESTART_LINE_S = 60.0
"""Seconds after the first step of a restart until a goodput line is printed. A shorter run prints only its end line."""


@dataclass
class GoodputMeter(RunObserver):
    """Observer that measures the time of a start for the log of starts. Only rank 0 has a meter.

    `config` is the fingerprint of the configuration, by which a crash loop is detected.
    """

    logs: Path
    print_line: Callable[[str], None] = lambda line: None
    began: Instant | None = None
    clock: Callable[[], Instant] = now
    config: str = ""
    _log: StartLog = field(init=False)
    _past: list[RunStart] = field(default_factory=list, init=False)
    _start: RunStart | None = field(default=None, init=False)
    _stop: str = field(default="", init=False)
    _section: str = field(default="train_s", init=False)
    _settled: float = field(default=0.0, init=False)
    _next_beat: float = field(default=0.0, init=False)
    _line_due_s: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._log = StartLog(self.logs)

    def begin(self, finished: int) -> None:
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
        self._start = RunStart(finished, began, present, TimeSpent(finished), config=self.config)
        # The last productive step of each earlier start is fixed from here on; its other points are not needed.
        stands = zip(self._past, standing([*self._past, self._start])[:-1], strict=True)
        self._past = [replace(past, course=((stood, past.train_s(stood)),)) for past, stood in stands]
        problem = self._log.add("start", self._start)
        if problem:  # only the detection of crash loops is lost
            self.print_line(
                f"warning: this start is not noted in run.dir/{self.logs.name}: {problem}; training goes on"
            )
        self._write_present()

    def enter(self, step: int, work: Work) -> None:
        # An evaluation or a checkpoint begins after its step.
        if self._start is not None and work in PAUSES:
            self._finish(step)
            self._settle()
            self._section = PAUSES[work]
            if work == "checkpoint":
                self._start = self._start.with_save()

    def finish(self, step: int) -> None:
        if self._start is None:
            return
        saved = self._section == "stall_s"
        self._finish(step)
        self._settle()
        self._section = "train_s"
        if saved:
            self._write_present()

    def measure(self, step: int) -> Mapping[str, float]:
        if self._start is None:
            return {}
        self.finish(step)
        self._write_present()
        return {"goodput": self.read().goodput}

    def saved(self, stall_s: float, write_s: float) -> None:
        """Record a committed checkpoint, with the seconds of its write in the background."""
        if self._start is not None:
            spent = self._start.spent
            self._spend(
                saves=spent.saves + 1,
                save_stall_s=spent.save_stall_s + stall_s,
                save_write_s=spent.save_write_s + write_s,
            )

    def beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + REFRESH_S
            self._write_present()

    def stopping(self, why: str) -> None:
        # On disk at once: a start that is killed before its step ends was stopped, and has not failed.
        self._stop = why
        self._write_present()

    def end(self, outcome: Outcome, why: str = "") -> None:
        if self._start is None:
            return
        if outcome != "failed" and self._section in PAUSES.values():
            self._settle()
        self._start = replace(self._start, outcome=outcome, why=why, stop=self._stop, seen=self.clock())
        goodput = self.read()
        self._log.add("end", self._start, goodput.record())
        self._log.replace(lambda: self._start)
        if outcome != "failed":  # after a failure the next start prints the line, once it has run for a while
            self.print_line(str(goodput))

    def read(self) -> Goodput:
        """Goodput of the run up to the current time."""
        starts = [*self._past]
        present = self._seen() or self._start
        if present:
            starts.append(present)
        return account(starts)

    def _finish(self, step: int) -> None:
        """Count the time since the last progress as part of a finished step."""
        assert self._start is not None
        first = self._start.spent.step == self._start.resumed
        if step == self._start.spent.step:
            return
        self._section = "train_s"
        if first:
            self._section = "start_s"
        self._spend(step=step)
        self._settle()
        # The previous start has printed its own line unless it failed.
        if first and self._past and self._past[-1].outcome in {"failed", "killed"}:
            self._line_due_s = self._settled + RESTART_LINE_S
        if self._settled >= self._line_due_s:
            self._line_due_s = math.inf
            self.print_line(str(self.read()))

    def _settle(self) -> None:
        """Add the time since the last progress to the current section."""
        assert self._start is not None
        if self._start.spent.step > self._start.resumed:
            up = self.clock().up
            self._spend(**{self._section: getattr(self._start.spent, self._section) + up - self._settled})
            self._settled = up

    def _spend(self, **changed: Any) -> None:
        assert self._start is not None
        self._start = replace(self._start, spent=replace(self._start.spent, **changed))

    def _write_present(self) -> None:
        self._log.replace(self._seen)

    def _seen(self) -> RunStart | None:
        """Record of the current start up to now; None before `begin` and after `end`."""
        start = self._start
        if start is None or start.outcome:
            return None
        return replace(start, stop=self._stop, seen=self.clock())
