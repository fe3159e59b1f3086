"""The way to the place where ranks tell each other what they do, which may be lost and found again."""

from __future__ import annotations

import time
from contextlib import suppress

from nxtrain.distributed.heartbeats import Board
from nxtrain.process.background import Aside


class Link:
    """A board, as long as its store answers.

    Args:
        board: Where the ranks meet; None: there is one rank, or they have no such place.

    Attributes:
        board: The same; None while it is lost.
        is_alone: There never was one.
    """

    def __init__(self, board: Board | None) -> None:
        self.board = board
        self.is_alone = board is None
        self._lost: Board | None = None
        self._lost_at = 0.0
        self._connecting = Aside("nxtrain-reach")

    @property
    def lost_s(self) -> float:
        """Seconds for which it is lost."""
        return time.monotonic() - self._lost_at if self._lost is not None and self.board is None else 0.0

    def lose(self) -> None:
        """Do without the store, and look for it again: it may have been slow for once."""
        if self.board is not None:
            self._lost, self.board, self._lost_at = self.board, None, time.monotonic()
        self.reach()

    def reach(self) -> None:
        """Look for a store that is lost, in a thread that nobody waits for."""

        def connect() -> None:
            with suppress(RuntimeError):  # tried again at the next beat
                self.board = self._lost.again() if self._lost is not None else None

        if self.board is None and self._lost is not None:
            self._connecting.start(connect)
