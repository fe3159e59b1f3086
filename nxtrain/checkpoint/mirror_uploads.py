"""Copies of a run's checkpoints in its mirror, made one after the other while the run goes on and saves others.

Nothing waits for a mirror but the end of a run, and that for a bounded time: a checkpoint counts without its copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from nxtrain.checkpoint.mirror import Mirrored, copy
from nxtrain.checkpoint.save import Retention
from nxtrain.distributed.agreement import Group, by_leader, gather
from nxtrain.io.checksummed_file import Stored
from nxtrain.io.transfer_progress import arrived
from nxtrain.mesh import Mesh

LOOK_S = 0.5
"""Between looks of ranks that wait for copies at how far all are."""

_THREAD = "nxtrain-mirror"


@dataclass(frozen=True)
class Patience:
    """How long the end of a run waits for its mirror.

    Args:
        still_s: Seconds in which no rank got on.
        most_s: Seconds in all.
        asked_s: Seconds once any rank is asked to stop.
    """

    still_s: float
    most_s: float = float("inf")
    asked_s: float = float("inf")


class Copies:
    """Brings checkpoints to the mirror. Every rank makes one, and adds the same in the same order.

    Args:
        mirrored: The mirror.
        retention: What stays there.
        mesh: The axes of this rank.
        group: Group of all ranks that can carry host objects, on which nobody else talks; None: there is only this one.
        talk: Group on which the ranks talk while training waits; None for the default group.
    """

    def __init__(self, mirrored: Mirrored, retention: Retention, mesh: Mesh, group: Group, talk: Group) -> None:
        self._mirrored, self._retention, self._mesh, self._group, self._talk = mirrored, retention, mesh, group, talk
        # One thread adds and another takes, each in one step of the interpreter.
        self._started: deque[_Copy] = deque()
        self._left_out: deque[int] = deque()
        self._last: _Copy | None = None
        self._waiting: _Copy | None = None

    @property
    def underway(self) -> list[int]:
        """Steps whose files are still read."""
        return [each.step for each in tuple(self._started) if not each.done]

    def offer(self, step: int, path: Path, written: Mapping[str, Stored], group: Group) -> None:
        """Copy a checkpoint; every rank calls this when it is committed.

        While one before is still being copied it waits for the next, which takes its place, or for the end of the run.

        Args:
            step: Of the checkpoint.
            path: Its folder.
            written: The files that this rank copies.
            group: On which ranks may agree now.
        """
        offered = _Copy(step, lambda: self._copy(step, path, written))
        # The leader ends last.
        waits = by_leader(lambda: bool(self.underway), self._mesh, group, "cannot ask for the copy before")
        if self._waiting is not None:
            self._left_out.append(self._waiting.step)
            self._waiting = None
        if waits:
            self._waiting = offered
        else:
            self._start(offered)

    def ended(self) -> Iterator[tuple[int, str]]:
        """What became of copies since this was asked last: step, and why it is not in the mirror; empty if it is."""
        while self._left_out:
            yield self._left_out.popleft(), "the copy of one before it took too long"
        while self._started and self._started[0].done:
            copied = self._started.popleft()
            yield copied.step, copied.problem

    def wait(self, patience: Patience, alive: Callable[[], None], asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait for all copies; every rank calls this, and all leave together.

        Args:
            patience: For how long.
            alive: Is called all the time.
            asked: Whether this rank is asked to stop.

        Returns:
            Whether all ended.
        """
        if self._waiting is not None:
            self._start(self._waiting)
            self._waiting = None
        began = moved = time.monotonic()
        limit, far, pause_s = began + patience.most_s, -1, 0.0
        while True:
            late = time.monotonic() > min(limit, moved + patience.still_s)
            told = gather((not self.underway, arrived(), late, asked()), self._mesh, self._talk)
            if all(done for done, _, _, _ in told):
                return True
            if told[0][2]:  # by one clock, so that all leave together
                return False
            if any(is_asked for _, _, _, is_asked in told):
                limit = min(limit, time.monotonic() + patience.asked_s)
            if (now := sum(count for _, count, _, _ in told)) != far:
                far, moved = now, time.monotonic()
            alive()
            pause_s = min(LOOK_S, pause_s + LOOK_S / 10)
            for each in tuple(self._started):
                each.join(pause_s)

    def _start(self, copied: _Copy) -> None:
        copied.before, self._last = self._last, copied
        self._started.append(copied)
        copied.start()

    def _copy(self, step: int, path: Path, written: Mapping[str, Stored]) -> str:
        keep, keep_every = self._retention.keep, self._retention.keep_every
        mesh, group = self._mesh, self._group
        return copy(self._mirrored, step, path, written, mesh, group, keep=keep, keep_every=keep_every)


def are_underway() -> bool:
    """Whether this process still copies something, which its end must not wait for."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


class _Copy(Thread):
    """A checkpoint that is brought to the mirror.

    Args:
        step: Its step.
        work: Copies it, and tells why it is not there.

    Attributes:
        before: The copy before it, which comes first.
    """

    def __init__(self, step: int, work: Callable[[], str]) -> None:
        # A process ends without it.
        super().__init__(name=_THREAD, daemon=True)
        self.step, self._work = step, work
        self.before: _Copy | None = None
        self.problem = ""
        self.done = False

    def run(self) -> None:
        """Copy it."""
        try:
            if self.before is not None:
                self.before.join()
                self.before = None
            self.problem = self._work()
        except Exception as error:  # whatever it is, training has no part in it
            self.problem = repr(error)
        finally:
            self.done = True
