"""How long this process has waited for others, which tells a slow rank from those that wait for it."""

from __future__ import annotations

import time


class Waits:
    """A clock that runs within its context.

    Attributes:
        total_s: Seconds so far.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.total_s += time.perf_counter() - self._since


WAITS = Waits()
"""Of the collectives on `torch.distributed`. On devices with streams waiting is left to these, and takes the host no
time."""
