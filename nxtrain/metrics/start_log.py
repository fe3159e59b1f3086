"""Log of a run's starts in the run folder, with the end and the time use of each.

`logs/starts.jsonl` gets a line when a start begins and a line when it ends. The next start writes the end of a killed
start. Each line describes a whole start. `logs/start.json` has the current start so far, and is replaced as a whole.
Its size does not grow with the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any

from nxtrain.common.io import jsonl
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.common.io.regular import read_text
from nxtrain.common.process.clock import Instant
from nxtrain.common.run_folder import START_FILE, STARTS_FILE
from nxtrain.metrics.goodput import RunStart, TimeSpent
from nxtrain.metrics.run_observer import Outcome, RunObserver

REFRESH_S = 1.0
"""Minimum seconds between two replacements of `start.json` while a run trains."""

SHOWN_CHARACTERS = 300
"""Maximum characters of a start's last message that are recorded."""


class StartLog:
    """Writer of the log of starts. A failing disk loses lines of the log, but does not end the run."""

    def __init__(self, logs: Path) -> None:
        self._current = logs / START_FILE
        self._starts = JsonlLog(logs / STARTS_FILE)
        self._writing = Lock()

    def add(self, event: str, start: RunStart, more: Mapping[str, float] | None = None) -> str:
        """Append a line for the beginning or end of a start; return the error that delays it, or an empty string."""
        with self._writing:
            return self._starts.add({"event": event, **_line(start), **(more or {})})

    def replace(self, current: Callable[[], RunStart | None]) -> None:
        """Replace `start.json` by the record of the current start, if there is one; callable from any thread.

        The file describes the previous start until the end of the previous start is in `starts.jsonl`.
        """
        with self._writing, suppress(OSError):
            if self._starts.write():
                return
            start = current()
            if start:
                _replace(self._current, {"event": "beat", **_line(start)})


class StepFile(RunObserver):
    """Writer of the last finished step to a node's `start.json`, for the launcher of a node without the log."""

    def __init__(self, logs: Path) -> None:
        self._file = logs / START_FILE
        self._finished = self._written = -1
        self._next_s = 0.0

    def begin(self, finished: int) -> None:
        self._finished = finished
        self._write()

    def finish(self, step: int) -> None:
        self._finished = step

    def beat(self) -> None:
        if time.monotonic() >= self._next_s:
            self._write()

    def end(self, outcome: Outcome, why: str) -> None:
        self._write()

    def _write(self) -> None:
        if self._finished != self._written:
            self._next_s = time.monotonic() + REFRESH_S
            with suppress(OSError):  # a disk that fails must not end the run
                _replace(self._file, {"step": self._finished})
                self._written = self._finished


def read(logs: Path) -> list[RunStart]:
    """Read the starts of a run; a last start without an end is described up to its last record."""
    starts: list[RunStart] = []
    moments: set[tuple[str, float]] = set()
    for name in (STARTS_FILE, START_FILE):
        with suppress(OSError):
            for line in jsonl.each(logs / name):
                _take(starts, moments, line)
    return starts


def last_step(logs: Path) -> int:
    """Last finished step of the current start, from its `start.json`; -1 without a readable file."""
    try:
        return int(json.loads(read_text(logs / START_FILE))["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content) + "\n", durable=False)


def _line(start: RunStart) -> dict[str, Any]:
    spent = {key: round(value, 6) for key, value in asdict(start.spent).items()}
    began, seen = start.began, start.seen
    line: dict[str, Any] = {"boot": began.boot, "began": began.up, "began_wall": began.wall, "resumed": start.resumed}
    line |= {"config": start.config, "up": seen.up, "wall": seen.wall, **spent}
    line["course"] = [(step, round(train_s, 6)) for step, train_s in start.course]
    ends = {"outcome": start.outcome, "why": start.why[:SHOWN_CHARACTERS], "stop": start.stop[:SHOWN_CHARACTERS]}
    return line | {key: value for key, value in ends.items() if value}


def _take(starts: list[RunStart], moments: set[tuple[str, float]], line: Any) -> None:
    """Add a log line to the list of starts; a line of another format, or of an earlier start, is ignored."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        spent = TimeSpent(**{key: line[key] for key in _SPENT})
        seen = Instant(line["boot"], line["up"], line["wall"])
        began = Instant(line["boot"], line["began"], line["began_wall"])
        course = tuple((step, train_s) for step, train_s in line["course"])
        ends = {key: str(line.get(key, "")) for key in ("outcome", "why", "stop")}
        start = RunStart(int(line["resumed"]), began, seen, spent, course=course, config=str(line["config"]), **ends)
        last = None
        if starts:
            last = starts[-1]
        moment = (began.boot, began.up)
        if moment not in moments:
            moments.add(moment)
            if last and not last.outcome:
                starts[-1] = replace(last, outcome="killed")
            starts.append(start)
        elif last and moment == (last.began.boot, last.began.up) and not last.outcome and seen.up >= last.seen.up:
            starts[-1] = replace(start, began=last.began, resumed=last.resumed)


_SPENT = tuple(asdict(TimeSpent(0)))
