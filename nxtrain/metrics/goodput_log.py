"""Log of the time that each start of a run spent, in the run folder; its size does not grow with the length of starts.

`logs/goodput.jsonl` gets a line when a start begins and a line when it ends; the next start writes the end of a killed
one. `logs/goodput.json` holds the current start so far, and is replaced as a whole. Each line describes a whole start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any

from nxtrain.io import jsonl
from nxtrain.metrics.goodput import Spent, Start
from nxtrain.process.clock import Instant
from nxtrain.run_folder import GOODPUT_FILE, GOODPUT_LATEST_FILE


class GoodputLog:
    """Writes the starts of a run; a failing disk loses lines of the log, but does not end the run.

    Args:
        logs: Folder of the files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._waiting: list[str] = []
        self._writing = Lock()

    def add(self, event: str, start: Start, more: Mapping[str, float] | None = None) -> None:
        """Append the begin or the end of a start to `goodput.jsonl`."""
        with self._writing:
            self._waiting.append(json.dumps({"event": event, **_line(start), **(more or {})}))
            self._flush()

    def replace(self, present: Callable[[], Start | None]) -> None:
        """Replace `goodput.json` by the current start, if there is one; from any thread.

        The file still describes the previous start until that start's end is in `goodput.jsonl`.
        """
        new = self._logs / f"{GOODPUT_LATEST_FILE}.tmp"
        with self._writing, suppress(OSError):
            if self._flush() and (start := present()):
                new.write_text(json.dumps({"event": "beat", **_line(start)}) + "\n", encoding="utf-8")
                new.replace(self._logs / GOODPUT_LATEST_FILE)

    def _flush(self) -> bool:
        """Write the waiting lines; True if none remains."""
        with suppress(OSError):
            self._logs.mkdir(parents=True, exist_ok=True)
            while self._waiting:
                jsonl.append(self._logs / GOODPUT_FILE, self._waiting[0])
                self._waiting.pop(0)
        return not self._waiting


def read(logs: Path) -> list[Start]:
    """Read the starts of a folder; a last start without an end is known up to its last record.

    Args:
        logs: Folder of the files.
    """
    found: list[Start] = []
    for name in (GOODPUT_FILE, GOODPUT_LATEST_FILE):
        with suppress(OSError):
            for line in jsonl.read(logs / name):
                _take(found, line)
    return found


def _line(start: Start) -> dict[str, Any]:
    spent = {key: round(value, 6) for key, value in asdict(start.spent).items()}
    began, seen = start.began, start.seen
    line: dict[str, Any] = {"boot": began.boot, "began": began.up, "began_wall": began.wall, "resumed": start.resumed}
    line |= {"up": seen.up, "wall": seen.wall, **spent}
    line["course"] = [(step, round(train_s, 6)) for step, train_s in start.course]
    return line | ({"outcome": start.outcome} if start.outcome else {})


def _take(found: list[Start], line: Any) -> None:
    """Add a line to the starts so far; a line of another format, or of an earlier start, is ignored."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        spent = Spent(**{key: line[key] for key in _SPENT})
        seen, outcome = Instant(line["boot"], line["up"], line["wall"]), line.get("outcome", "")
        key = (line["boot"], line["began"])
        known = next((start for start in found if (start.began.boot, start.began.up) == key), None)
        if known is None:
            began = Instant(*key, line["began_wall"])
            start = Start(line["resumed"], began, seen, spent, outcome, _course(line))
            if found and not found[-1].outcome:
                found[-1] = replace(found[-1], outcome="killed")
            found.append(start)
        elif known is found[-1] and not known.outcome and seen.up >= known.seen.up:
            present = replace(known, seen=seen, spent=spent, outcome=outcome)
            if "course" in line:
                present = replace(present, course=_course(line))
            elif line["event"] == "saved":  # the format of earlier versions
                present = present.with_save()
            found[-1] = present


def _course(line: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple((step, train_s) for step, train_s in line.get("course", ()))


_SPENT = tuple(asdict(Spent(0)))
