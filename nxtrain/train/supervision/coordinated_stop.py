"""Coordinated stop: all ranks stop after the same step, the last that any rank had begun when it learned of the stop.

A rank that learns of a stop publishes the last step that it has begun. It begins no further step until all ranks have
published theirs. The run stops after the greatest of these steps, which some ranks have still to reach. No rank begins
a step beyond the published one, so no rank waits in a collective for a stopped rank. A step without a stop costs
neither a collective nor a device read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nxtrain.common.distributed.heartbeats import PATIENCE_S, HeartbeatLink, HeartbeatStore
from nxtrain.common.errors import LostPeerError
from nxtrain.common.process.deadlines import SingleTask
from nxtrain.common.process.signals import Signals
from nxtrain.common.process.stacks import print_line

SOON_S, SOON_S_PER_RANK = 0.05, 0.25e-3
"""Seconds between polls for the agreed last step: a constant, and an addition per rank."""

GIVE_UP_S = 1.5 * PATIENCE_S
"""Seconds after which a stop gives up on a lost store: longer than a new connection takes."""


class StepGate:
    """Gate before each step of this rank, which blocks while ranks agree on the last step; its methods are thread-safe.

    Args:
        begun: Last step that was begun, or finished before this start.
    """

    def __init__(self, begun: int = 0) -> None:
        self._begun = begun
        self._changed = threading.Condition()
        self._frozen = False
        self._last: int | None = None
        self._lost = ""

    def freeze(self) -> int:
        """Block further steps until the last step is decided; return the last step that was begun."""
        with self._changed:
            self._frozen = True
            return self._begun

    def decide(self, last: int) -> None:
        """Set the last step, and unblock the steps up to it."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def lose(self, failure: str) -> None:
        """End the wait for a decision with an error, since a rank has failed."""
        with self._changed:
            self._lost = failure
            self._changed.notify_all()

    def resume(self, step: int) -> None:
        """Count begun steps from a finished step, at which a resumed run starts."""
        with self._changed:
            self._begun = max(self._begun, step)

    def stops(self, step: int) -> bool:
        """True if the run stops after a step; otherwise the next step counts as begun. May wait for other ranks."""
        with self._changed:
            if self._frozen:
                self._changed.wait_for(lambda: self._last is not None or self._lost)
                if self._last is None:
                    raise LostPeerError(f"{self._lost}\nthe run was about to stop, and ends without a new checkpoint")
                if self._last <= step:
                    return True
            self._begun = step + 1
            return False


class StopCoordinator:
    """This rank's part in the agreement on the last step of a coordinated stop, polled by the watchdog's thread.

    Args:
        rank, world: This rank, and the number of ranks.
        signals: Stop signals that this process has received.
        link: Connection to the store of heartbeats.
        on_stop: Called with the reason, in a separate thread, once the run is to stop.

    Attributes:
        gate: Gate before each step.
        why: The signal and the rank that received it; empty without a stop.
    """

    def __init__(
        self, rank: int, world: int, signals: Signals, link: HeartbeatLink, on_stop: Callable[[str], None]
    ) -> None:
        self.gate = StepGate()
        self.why = ""
        self._rank, self._world = rank, world
        self._signals = signals
        self._link = link
        self._on_stop = on_stop
        self._frozen = self._decided = False
        self._published_stop = self._published_begun = False
        self._on_stop_task = SingleTask()

    @property
    def pause_s(self) -> float | None:
        """Seconds until the next poll; None if the watchdog's usual interval is enough."""
        if not self._frozen or self._decided:
            return None
        return SOON_S + self._world * SOON_S_PER_RANK

    def poll(self, *, due: bool) -> None:
        """Poll for a stop request, publish the last begun step of this rank, and read the agreed last step.

        Args:
            due: Also read the requests of other ranks, which is done rarely, since many ranks read one store.
        """
        if self._decided:
            return
        if self._link.is_alone:
            if self._signals.asked:
                self._freeze(self._signals.asked)
                self._decide(self.gate.freeze())
                self._report_stop()
            return
        try:
            if self._link.store is not None:
                self._agree(self._link.store, due=due)
            elif (self._signals.asked or self._frozen) and self._link.lost_s > GIVE_UP_S:
                self.gate.freeze()  # the other ranks' steps are unknown, so no last step can be agreed upon
                self.gate.lose("the store in which the ranks met does not answer")
                self._decided = True
        except RuntimeError:
            self._link.lose()

    def publish_finished(self, board: HeartbeatStore) -> None:
        """Publish that this rank begins no further step, since its run has ended normally."""
        if not self._published_begun:
            board.publish_begun(self.gate.freeze())

    def _agree(self, board: HeartbeatStore, *, due: bool) -> None:
        """Exchange stop requests, begun steps and the agreed last step with the other ranks."""
        asked = self._signals.asked
        if asked and not self._published_stop:
            board.ask_stop(f"{asked} at rank {self._rank}")
            self._published_stop = True
        if self._published_begun:
            step = board.stop_step()
            if step is not None:
                self._decide(step)
                return
            failure = board.failure()
            if failure:
                self.gate.lose(failure)
            return
        if not self._frozen and (self._published_stop or due) and board.calls():
            why = board.stop_asked()
            if why:
                self._freeze(why)
        if self._frozen:
            board.publish_begun(self.gate.freeze())
            self._published_begun = True
            self._report_stop()

    def _freeze(self, why: str) -> None:
        self._frozen = True
        self.why = why
        if self._rank == 0:
            print_line(f"{why}: the run stops at the end of this step; a second signal ends it at once")

    def _decide(self, step: int) -> None:
        self.gate.decide(step)
        self._decided = True

    def _report_stop(self) -> None:
        """Report the stop to observers at once, so that a run killed before its step ends counts as stopped."""
        self._on_stop_task.start(lambda: self._on_stop(self.why))
