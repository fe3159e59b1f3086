"""Detection of gradient norm spikes: steps whose norm is above the running mean of the last steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 20
"""Number of steps in the running mean."""


class NormSpikes:
    """Detector of gradient norm spikes, which gets one norm per step; the result depends on the norms only.

    A step belongs to a spike if its norm is above the mean of the `WINDOW` norms before, by more than a threshold. A
    spike is a run of such steps. Norms that are not finite are ignored: such steps update nothing.

    Source: Fan et al. 2024, HLAT (arXiv:2404.10630): a running mean over 20 steps, and a threshold of 0.1 above it.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._before: deque[float] = deque(maxlen=WINDOW)
        self._first, self._length = 0, 0
        self._ended: list[tuple[int, int]] = []
        self._lowest = math.inf

    @property
    def mean(self) -> float | None:
        """Running mean of the norm up to the newest step; None before the first `WINDOW` steps."""
        return math.fsum(self._before) / WINDOW if len(self._before) == WINDOW else None

    @property
    def lowest(self) -> float | None:
        """Lowest running mean of the norm so far; None before the first `WINDOW` steps."""
        return self._lowest if math.isfinite(self._lowest) else None

    def see(self, step: int, norm: float) -> None:
        """Add the gradient norm of a step."""
        if not math.isfinite(norm):
            return
        mean = self.mean
        if mean is not None and norm > mean + self._threshold:
            if not self._length:
                self._first = step
            self._length += 1
        elif self._length:
            self._ended.append((self._first, self._length))
            self._length = 0
        self._before.append(norm)
        mean = self.mean
        if mean is not None:
            self._lowest = min(self._lowest, mean)

    def take(self) -> tuple[tuple[int, int], ...]:
        """First step and number of steps of each spike that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def state(self) -> dict[str, Any]:
        """State of the detector for a checkpoint, as JSON values; floats are exact."""
        return {
            "before": [*self._before],
            "spike": [self._first, self._length],
            "ended": [list(spike) for spike in self._ended],
            "lowest": self.lowest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; an empty state resets the detector."""
        self._before = deque(state.get("before", ()), maxlen=WINDOW)
        self._first, self._length = state.get("spike", (0, 0))
        self._ended = [(first, length) for first, length in state.get("ended", ())]
        self._lowest = math.inf
        if state.get("lowest") is not None:
            self._lowest = state["lowest"]
