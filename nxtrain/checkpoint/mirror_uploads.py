"""Uploads of a run's checkpoints to its mirror, one after the other, while training goes on.

Only the end of a run waits for uploads, and for a bounded time. A checkpoint counts as saved without its upload.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nxtrain.checkpoint.directory import Retention, step_of
from nxtrain.checkpoint.mirror import Mirror, copy
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.io.checksummed_file import FileDigest, transferred
from nxtrain.common.process.background import BackgroundTask

EXCHANGE_S = 0.5
"""Longest pause, in seconds, between two exchanges of the progress of all ranks."""

_THREAD = "nxtrain-mirror"


@dataclass(frozen=True)
class UploadDeadline:
    """Limits of the wait for uploads: without progress, in all, and after a request to stop, on any rank."""

    stall_s: float
    total_s: float = float("inf")
    after_stop_s: float = float("inf")


@dataclass(frozen=True)
class UploadOutcome:
    """Result of uploading one checkpoint; `problem` is empty if it was uploaded."""

    step: int
    problem: str = ""


class MirrorUploader:
    """Uploads checkpoints to the mirror. Every rank makes one, and offers the same checkpoints in one order."""

    def __init__(self, mirror: Mirror, retention: Retention, ranks: Ranks) -> None:
        self._mirror, self._retention = mirror, retention
        self._ranks = ranks
        # One thread adds and another takes, each in one step of the interpreter.
        self._started: deque[tuple[int, BackgroundTask[str]]] = deque()
        self._ended: deque[UploadOutcome] = deque()
        self._last: BackgroundTask[str] | None = None
        self._waiting: tuple[int, BackgroundTask[str]] | None = None

    @property
    def underway(self) -> list[int]:
        """Steps whose files an upload still reads."""
        return [step for step, task in tuple(self._started) if not task.done]

    def offer(self, path: Path, written: Mapping[str, FileDigest], ranks: Ranks) -> None:
        """Upload a checkpoint; every rank calls this after the commit.

        A checkpoint waits while an earlier upload is under way. The next offer replaces a waiting checkpoint; the end
        of the run uploads it.
        """
        task = BackgroundTask(_THREAD, partial(self._upload, path, written, self._last))
        # The leader's upload ends last.
        waits = ranks.on_leader(lambda: bool(self.underway), "cannot ask for the copy before")
        if self._waiting is not None:
            self._ended.append(UploadOutcome(self._waiting[0], "the copy of one before it took too long"))
        self._waiting = step_of(path), task
        if not waits:
            self._start_waiting()

    def poll(self) -> list[UploadOutcome]:
        """Uploads that ended since the last call; never waits."""
        while self._started and self._started[0][1].done:
            step, task = self._started.popleft()
            self._ended.append(UploadOutcome(step, task.result()))
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(
        self,
        deadline: UploadDeadline,
        ranks: Ranks,
        heartbeat: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for all uploads, and return True if all ended; every rank calls this, and all ranks return together."""
        self._start_waiting()
        began = moved = time.monotonic()
        limit = began + deadline.total_s
        last_total = -1
        pause_s = 0.0
        while True:
            late = time.monotonic() > min(limit, moved + deadline.stall_s)
            answers = ranks.gather((not self.underway, transferred(), late, stop_requested()))
            if all(done for done, _, _, _ in answers):
                return True
            if answers[0][2]:  # by the clock of rank 0, so that all ranks return together
                return False
            if any(is_asked for _, _, _, is_asked in answers):
                limit = min(limit, time.monotonic() + deadline.after_stop_s)
            total = sum(num_bytes for _, num_bytes, _, _ in answers)
            if total != last_total:
                last_total, moved = total, time.monotonic()
            heartbeat()
            pause_s = min(EXCHANGE_S, pause_s + EXCHANGE_S / 10)
            for _, task in tuple(self._started):
                task.join(pause_s)

    def _start_waiting(self) -> None:
        if self._waiting is not None:
            self._started.append(self._waiting)
            self._last = self._waiting[1]
            self._waiting = None
            self._last.start()

    def _upload(self, path: Path, written: Mapping[str, FileDigest], before: BackgroundTask[str] | None) -> str:
        if before is not None:
            before.join()
        try:
            return copy(self._mirror, path, written, self._retention, self._ranks)
        except Exception as error:  # no failure of an upload ends training
            return repr(error)


def are_underway() -> bool:
    """True if this process still uploads; the end of the process must not wait for uploads."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
