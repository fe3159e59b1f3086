"""The step after which all ranks stop: the last that any of them had begun when it heard of the stop.

A rank that hears of a stop says which step it has begun last and begins no other until all have said so. The stop is
after the greatest of these, which some ranks have still to reach. Nobody begins a step beyond what it said, so nobody
waits in a collective for a rank that has stopped; and steps cost neither a collective nor a read from the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nxtrain.distributed.heartbeats import PATIENCE_S, Board
from nxtrain.distributed.link import Link
from nxtrain.errors import LostPeerError
from nxtrain.process.background import Aside
from nxtrain.process.signals import Signals
from nxtrain.process.stacks import say

SOON_S, SOON_S_PER_RANK = 0.05, 0.25e-3
"""Between looks for the step after which all stop."""

GIVE_UP_S = 1.5 * PATIENCE_S
"""For a store that is lost while the run is to stop: more than a new connection takes."""


class Gate:
    """Before each step of this rank; all methods may be called from any thread.

    Args:
        begun: The last step that was begun, or finished before this start.
    """

    def __init__(self, begun: int = 0) -> None:
        self._begun = begun
        self._changed = threading.Condition()
        self._frozen = False
        self._last: int | None = None
        self._lost = ""

    def freeze(self) -> int:
        """Begin no other step until it is decided which is the last; the last that was begun."""
        with self._changed:
            self._frozen = True
            return self._begun

    def decide(self, last: int) -> None:
        """Go on up to a step."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def lose(self, words: str) -> None:
        """Wait for no decision any more, since a rank has failed."""
        with self._changed:
            self._lost = words
            self._changed.notify_all()

    def resume(self, step: int) -> None:
        """Count from a step that is finished already."""
        with self._changed:
            self._begun = max(self._begun, step)

    def stops(self, step: int) -> bool:
        """Whether the run stops after a step; if not, the next one counts as begun. May wait for other ranks.

        Raises:
            LostPeerError: A rank has failed in the meantime.
        """
        with self._changed:
            if self._frozen:
                self._changed.wait_for(lambda: self._last is not None or self._lost)
                if self._last is None:
                    raise LostPeerError(f"{self._lost}\nthe run was about to stop, and ends without a checkpoint")
                if self._last <= step:
                    return True
            self._begun = step + 1
            return False


class Stop:
    """This rank's part in finding out after which step all stop; a thread looks again and again.

    Args:
        rank, world: This rank, and how many there are.
        signals: What this process was asked for.
        link: To the other ranks.
        told: Is called with the reason, in a thread of its own, once the run is to stop.

    Attributes:
        gate: Before each step.
        why: Which signal, at which rank; empty: none.
    """

    def __init__(self, rank: int, world: int, signals: Signals, link: Link, told: Callable[[str], None]) -> None:
        self.gate = Gate()
        self.why = ""
        self._rank, self._world, self._signals, self._link, self._told = rank, world, signals, link, told
        self._frozen = self._decided = self._told_asked = self._told_begun = False
        self._noting = Aside("nxtrain-note")

    @property
    def pause_s(self) -> float | None:
        """How soon to look again; None: there is no hurry."""
        return SOON_S + self._world * SOON_S_PER_RANK if self._frozen and not self._decided else None

    def look(self, *, due: bool) -> None:
        """Hear of a stop, say how far this rank is, and learn what was decided.

        Args:
            due: Also ask what others want, which is not done all the time: many ranks ask one store.
        """
        if self._decided:
            return
        if self._link.is_alone:
            if self._signals.asked:
                self._freeze(self._signals.asked)
                self._decide(self.gate.freeze())
                self._note()
            return
        try:
            if self._link.board is not None:
                self._meet(self._link.board, due=due)
            elif (self._signals.asked or self._frozen) and self._link.lost_s > GIVE_UP_S:
                self.gate.freeze()  # what the others do is unknown, so that no step can be agreed upon
                self.gate.lose("the store in which the ranks met does not answer")
                self._decided = True
        except RuntimeError:
            self._link.lose()

    def leave(self, board: Board) -> None:
        """Say that this rank begins no other step, since its run has ended well."""
        if not self._told_begun:
            board.say_begun(self.gate.freeze())

    def _meet(self, board: Board, *, due: bool) -> None:
        asked = self._signals.asked
        if asked and not self._told_asked:
            board.ask_stop(f"{asked} at rank {self._rank}")
            self._told_asked = True
        if self._told_begun:
            if (step := board.stop_step()) is not None:
                self._decide(step)
            elif words := board.failure():
                self.gate.lose(words)
            return
        if not self._frozen and (self._told_asked or due) and board.calls() and (why := board.stop_asked()):
            self._freeze(why)
        if self._frozen:
            board.say_begun(self.gate.freeze())
            self._told_begun = True
            self._note()

    def _freeze(self, why: str) -> None:
        self._frozen = True
        self.why = why
        if self._rank == 0:
            say(f"{why}: the run stops at the end of this step; a second signal ends it at once")

    def _decide(self, step: int) -> None:
        self.gate.decide(step)
        self._decided = True

    def _note(self) -> None:
        """Let it be noted now: a run that is killed before its step ends was stopped, and has not failed."""
        self._noting.start(lambda: self._told(self.why))
