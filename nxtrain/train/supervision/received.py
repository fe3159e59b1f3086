"""Signs of life of a restoration: bytes that come or go, here or at another rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from nxtrain.distributed.heartbeats import Board


class Received:
    """What came of a checkpoint, or went to its mirror, at this rank and at those for which it waits.

    Args:
        here: Tells the bytes that this process has received or sent.

    Attributes:
        at: When something came last.
    """

    def __init__(self, here: Callable[[], int]) -> None:
        self._here = here
        self._seen = self._told = self._all = 0
        self.at = time.monotonic()

    def look(self) -> None:
        """Look what came to this process."""
        if (seen := self._here()) != self._seen:
            self._seen, self.at = seen, time.monotonic()

    def share(self, board: Board) -> None:
        """Tell the other ranks, and hear of them."""
        new = self._seen - self._told
        together = board.advance(new)
        self._told += new
        if together != self._all:
            self._all, self.at = together, time.monotonic()
