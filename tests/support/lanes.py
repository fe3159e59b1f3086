"""Lanes of numbers that workers open without a corpus, some of which end their process or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxtrain.data.stream_loader import Lane, LaneOrder, Place

WIDTH = 5


class NumberedLane:
    """Rows of numbers that name the lane and the row."""

    def __init__(self, lane: int, place: Place, mark: Callable[[str], None] | None, poison: int) -> None:
        self._lane, self._row, self._mark, self._poison = lane, place[0], mark, poison

    @property
    def place(self) -> Place:
        """Place of the next row."""
        return self._row, 0

    def row(self) -> NDArray[np.int32]:
        """Next row; the poisonous one ends the process."""
        if self._mark:
            self._mark(f"numbers.arrow, document {self._row}")
        if self._row == self._poison:
            os.kill(os.getpid(), signal.SIGSEGV)
        self._row += 1
        return np.full(WIDTH, 1000 * self._lane + self._row, np.int32)


@dataclass(frozen=True)
class NumberedLanes:
    """Source of lanes of numbers.

    Args:
        poison: Row of each lane that ends the process; -1: none.
    """

    poison: int = -1

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, Place], Lane]:
        """Function that opens a lane."""
        return lambda order, lane, place: NumberedLane(lane, place, mark, self.poison)
