"""Uploads of a run's checkpoints to its mirror, one at a time, in the background of training.

Only the end of a run waits for uploads, up to a deadline. A checkpoint counts as saved before its upload.
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
from nxtrain.checkpoint.mirror import Mirror, copy, prune
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.io.checksummed_file import FileDigest, transferred
from nxtrain.common.process.background import BackgroundTask

EXCHANGE_S = 0.5
"""Longest interval, in seconds, between exchanges of upload progress among ranks."""

_THREAD = "nxtrain-mirror"


@dataclass(frozen=True)
class UploadDeadline:
    """Time limits, in seconds, of the wait for uploads.

    Args:
        stall_s: Limit without progress on any rank.
        total_s: Limit of the whole wait.
        after_stop_s: Limit after a request to stop on any rank.
    """

    stall_s: float
    total_s: float = float("inf")
    after_stop_s: float = float("inf")


@dataclass(frozen=True)
class UploadOutcome:
    """Result of the upload of one checkpoint.

    Args:
        problem: Reason why the mirror lacks the checkpoint; empty on success.
        untidy: Failure of the retention after a successful upload; empty on success.
    """

    step: int
    problem: str = ""
    untidy: str = ""


class MirrorUploader:
    """Uploader of checkpoints to the mirror; every rank creates one, and offers the same checkpoints in order."""

    def __init__(self, mirror: Mirror, retention: Retention, ranks: Ranks) -> None:
        self._mirror, self._retention = mirror, retention
        self._ranks = ranks
        # One thread appends and another pops, each in one atomic operation of the interpreter.
        self._started: deque[tuple[int, BackgroundTask[UploadOutcome]]] = deque()
        self._ended: deque[UploadOutcome] = deque()
        self._last: BackgroundTask[UploadOutcome] | None = None
        self._waiting: tuple[int, BackgroundTask[UploadOutcome]] | None = None

    @property
    def underway(self) -> list[int]:
        """Steps of checkpoints whose upload is not finished."""
        return [step for step, task in tuple(self._started) if not task.done]

    def offer(self, path: Path, written: Mapping[str, FileDigest], ranks: Ranks) -> None:
        """Start the upload of a committed checkpoint, or queue the checkpoint. Every rank calls this after the commit.

        A checkpoint is queued while an earlier upload is running. A later offer replaces the queued checkpoint. At the
        end of the run, the queued checkpoint is uploaded.
        """
        task = BackgroundTask(_THREAD, partial(self._upload, path, written, self._last))
        # The leader's upload finishes last.
        waits = ranks.on_leader(lambda: bool(self.underway), "cannot ask for the copy before")
        if self._waiting is not None:
            self._ended.append(UploadOutcome(self._waiting[0], "the copy of one before it took too long"))
        self._waiting = step_of(path), task
        if not waits:
            self._start_waiting()

    def poll(self) -> list[UploadOutcome]:
        """Return the results of uploads that ended since the last call, without waiting."""
        while self._started and self._started[0][1].done:
            _, task = self._started.popleft()
            self._ended.append(task.result())
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(
        self,
        deadline: UploadDeadline,
        ranks: Ranks,
        heartbeat: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for all uploads until a deadline. Every rank calls this, and all ranks return together.

        Args:
            deadline: Time limits of the wait.
            ranks: All ranks of the run.
            heartbeat: Function called regularly during the wait.
            stop_requested: Function that returns True after a request to stop the run.

        Returns:
            True if all uploads ended; False at the deadline.
        """
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

    def _upload(
        self, path: Path, written: Mapping[str, FileDigest], before: BackgroundTask[UploadOutcome] | None
    ) -> UploadOutcome:
        if before is not None:
            before.join()
        untidy = ""
        try:
            problem = copy(self._mirror, path, written, self._ranks)
            if not problem:
                untidy = prune(self._mirror, self._retention, self._ranks)
        except Exception as error:  # no failure of an upload ends training
            problem = repr(error)
        return UploadOutcome(step_of(path), problem, untidy)


def are_underway() -> bool:
    """True if this process is still uploading; the end of the process must not wait for uploads."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
