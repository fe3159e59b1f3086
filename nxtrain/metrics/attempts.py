"""Starts of a run with the last step of each, to detect a crash loop: a run that always ends at the same step.

`logs/attempts.jsonl` has a line for each start and each end. `logs/progress.json` has the last step of the current
start, because a killed process writes no end.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nxtrain.errors import CrashLoopError
from nxtrain.io import jsonl
from nxtrain.io.regular import read_text
from nxtrain.run_folder import ATTEMPTS_FILE, LOGS_DIR, PROGRESS_FILE

REFRESH_S = 1.0
"""Seconds between writes of the progress file."""

SHOWN_CHARACTERS = 300
"""Most characters of an attempt's last message that are recorded."""


@dataclass(frozen=True)
class Ended:
    """A failed attempt.

    Args:
        config: Fingerprint of the attempt's configuration.
        step: Last finished step.
        why: Message of the failure; empty if the attempt was killed.
    """

    config: str
    step: int
    why: str


class Reached:
    """Last finished step of the current start, on a disk: the launcher counts restarts without progress by it.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOGS_DIR / PROGRESS_FILE
        self._written, self._next = -1, 0.0

    def note(self, step: int, *, now: bool = False) -> None:
        """Record the last finished step; writes at most every `REFRESH_S` seconds, unless `now` is set.

        Raises:
            OSError: The file cannot be written.
        """
        if step != self._written and (now or time.monotonic() >= self._next):
            self._next = time.monotonic() + REFRESH_S
            _replace(self._file, {"step": step})
            self._written = step


class Attempts:
    """Attempts of a run, written by its leader.

    Args:
        folder: Folder of the run.
        config: Text of the configuration; failures under another configuration do not count.
    """

    def __init__(self, folder: Path, config: str) -> None:
        self._file, self._progress = folder / LOGS_DIR / ATTEMPTS_FILE, folder / LOGS_DIR / PROGRESS_FILE
        self._config = hashlib.sha256(config.encode()).hexdigest()[:16]
        self._reached = Reached(folder)

    def refuse_loop(self, most: int) -> None:
        """Refuse to start a run that has failed too often at the same step.

        Args:
            most: Failures in a row at one step, with one configuration; 0: never refuse.

        Raises:
            CrashLoopError: The last `most` attempts failed at the same step with this configuration.
        """
        ends = self._ends()
        if not most or len(ends) < most:
            return
        last = ends[-most:]
        if len({(end.step, end.config) for end in last}) > 1 or last[-1].config != self._config:
            return
        why = last[-1].why or "it said nothing, as if killed"
        raise CrashLoopError(
            f"the last {most} attempts of this run all ended after step {last[-1].step}; of the last one is known: "
            f"{why}. A further one would likely end there too (recovery.max_same_step={most}). Mend the cause and "
            f"start again with another configuration, with recovery.max_same_step=0, or without {self._file}"
        )

    def begin(self, resumed: int) -> None:
        """Record a start.

        Args:
            resumed: Step of the checkpoint from which the start resumes.
        """
        before = progress(self._progress)
        self._append({"event": "start", "config": self._config, "resumed": resumed, "before": before})
        self.reach(resumed, now=True)

    def reach(self, step: int, *, now: bool = False) -> None:
        """Record the last finished step; see `Reached.note`."""
        self._reached.note(step, now=now)

    def end(self, outcome: str, step: int, why: str = "") -> None:
        """Record the end.

        Args:
            outcome: `done`, `stopped` or `failed`. If a start records several ends, the first counts.
            step: Last finished step.
            why: Message for people.
        """
        with suppress(OSError):  # another thread may write the file at the same time
            self.reach(step, now=True)
        self._append({"event": "end", "outcome": outcome, "step": step, "why": why[:SHOWN_CHARACTERS]})

    def _ends(self) -> list[Ended]:
        """Failures since the last attempt that ended with `done` or `stopped`."""
        found: list[Ended] = []
        config: str | None = None
        for line in jsonl.read(self._file):
            with suppress(KeyError):  # a line of another format
                if line["event"] == "start":
                    new = str(line["config"])
                    if config is not None:  # killed; the next start recorded the step that it reached
                        found.append(Ended(config, line.get("before", -1), ""))
                    config = new
                elif config is not None:
                    end = Ended(config, line["step"], line["why"])
                    found = [*found, end] if line["outcome"] == "failed" else []
                    config = None
        if config is not None:
            found.append(Ended(config, progress(self._progress), ""))
        return found

    def _append(self, line: dict[str, Any]) -> None:
        line["at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        jsonl.append(self._file, json.dumps(line))


def progress(path: Path) -> int:
    """Last finished step of a progress file; -1 if the file has none."""
    try:
        return int(json.loads(read_text(path))["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1


def _replace(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".tmp")
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    new.replace(path)
