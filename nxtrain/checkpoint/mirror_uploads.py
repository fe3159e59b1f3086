"""Uploads of a run's checkpoints to its mirror, one after the other, while training goes on.

Only the end of a run waits for uploads, and for a bounded time. A checkpoint counts as saved without its upload.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from nxtrain.checkpoint.directory import Retention
from nxtrain.checkpoint.mirror import Mirror, copy
from nxtrain.distributed.agreement import Ranks
from nxtrain.io.checksummed_file import FileDigest, transferred

LOOK_S = 0.5
"""Longest pause, in seconds, between two exchanges of the progress of all ranks."""

_THREAD = "nxtrain-mirror"


@dataclass(frozen=True)
class UploadDeadline:
    """Limits of the wait for uploads at the end of a run.

    Args:
        still_s: Seconds without progress on any rank.
        most_s: Seconds in all.
        asked_s: Seconds after any rank is asked to stop.
    """

    still_s: float
    most_s: float = float("inf")
    asked_s: float = float("inf")


class MirrorUploader:
    """Uploads checkpoints to the mirror. Every rank makes one uploader, and offers the same checkpoints in one order.

    Args:
        mirror: The mirror.
        retention: Checkpoints that stay in the mirror.
        ranks: All ranks, over a group that only uploads use.
    """

    def __init__(self, mirror: Mirror, retention: Retention, ranks: Ranks) -> None:
        self._mirror, self._retention, self._ranks = mirror, retention, ranks
        # One thread adds and another takes, each in one step of the interpreter.
        self._started: deque[_Upload] = deque()
        self._left_out: deque[int] = deque()
        self._last: _Upload | None = None
        self._waiting: _Upload | None = None

    @property
    def underway(self) -> list[int]:
        """Steps whose files an upload still reads."""
        return [each.step for each in tuple(self._started) if not each.done]

    def offer(self, step: int, path: Path, written: Mapping[str, FileDigest], ranks: Ranks) -> None:
        """Upload a checkpoint; every rank calls this after the commit.

        While an earlier upload is under way the checkpoint waits: until the next offer, which replaces it, or until the
        end of the run.

        Args:
            step: Step of the checkpoint.
            path: Folder of the checkpoint.
            written: The files that this rank uploads.
            ranks: All ranks, over the group on which they agree during this call.
        """
        offered = _Upload(step, lambda: copy(self._mirror, path, written, self._retention, self._ranks))
        # The leader's upload ends last.
        waits = ranks.on_leader(lambda: bool(self.underway), "cannot ask for the copy before")
        if self._waiting is not None:
            self._left_out.append(self._waiting.step)
            self._waiting = None
        if waits:
            self._waiting = offered
        else:
            self._start(offered)

    def ended(self) -> Iterator[tuple[int, str]]:
        """Uploads that ended since the last call: step, and the reason of a failure; empty for a success."""
        while self._left_out:
            yield self._left_out.popleft(), "the copy of one before it took too long"
        while self._started and self._started[0].done:
            upload = self._started.popleft()
            yield upload.step, upload.problem

    def wait(
        self,
        patience: UploadDeadline,
        ranks: Ranks,
        alive: Callable[[], None],
        asked: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for all uploads; every rank calls this, and all ranks return together.

        Args:
            patience: Limits of the wait.
            ranks: All ranks, over the group on which they agree while training waits.
            alive: Heartbeat; called again and again.
            asked: True once this rank is asked to stop.

        Returns:
            True if all uploads ended.
        """
        if self._waiting is not None:
            self._start(self._waiting)
            self._waiting = None
        began = moved = time.monotonic()
        limit, last_total, pause_s = began + patience.most_s, -1, 0.0
        while True:
            late = time.monotonic() > min(limit, moved + patience.still_s)
            answers = ranks.gather((not self.underway, transferred(), late, asked()))
            if all(done for done, _, _, _ in answers):
                return True
            if answers[0][2]:  # by the clock of rank 0, so that all ranks return together
                return False
            if any(is_asked for _, _, _, is_asked in answers):
                limit = min(limit, time.monotonic() + patience.asked_s)
            if (total := sum(num_bytes for _, num_bytes, _, _ in answers)) != last_total:
                last_total, moved = total, time.monotonic()
            alive()
            pause_s = min(LOOK_S, pause_s + LOOK_S / 10)
            for each in tuple(self._started):
                each.join(pause_s)

    def _start(self, upload: _Upload) -> None:
        upload.before, self._last = self._last, upload
        self._started.append(upload)
        upload.start()


def are_underway() -> bool:
    """True if this process still uploads; the end of the process must not wait for uploads."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


class _Upload(Thread):
    """Thread that uploads one checkpoint.

    Args:
        step: Step of the checkpoint.
        work: Uploads the checkpoint; returns the reason of a failure.

    Attributes:
        before: The previous upload, which must end first.
    """

    def __init__(self, step: int, work: Callable[[], str]) -> None:
        # A daemon thread: the process can end before the upload does.
        super().__init__(name=_THREAD, daemon=True)
        self.step, self._work = step, work
        self.before: _Upload | None = None
        self.problem = ""
        self.done = False

    def run(self) -> None:
        """Upload the checkpoint."""
        try:
            if self.before is not None:
                self.before.join()
                self.before = None
            self.problem = self._work()
        except Exception as error:  # no failure of an upload ends training
            self.problem = repr(error)
        finally:
            self.done = True
