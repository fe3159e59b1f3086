"""The step after which all ranks stop: the last that any of them had begun when it heard of the stop.

A rank that hears of a stop says which step it has begun last and begins no other until all have said so. The stop is
after the greatest of these, which some ranks have still to reach. Nobody begins a step beyond what it said, so nobody
waits in a collective for a rank that has stopped; and steps cost neither a collective nor a read from the device.
"""

from __future__ import annotations

import threading

from nxtrain.errors import LostPeerError


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
