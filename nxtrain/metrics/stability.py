"""Detector of spikes and divergence, from the losses and gradient norms of all steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

SPIKE = 10.0
"""Threshold of a spike: a multiple of the median of the values before."""
WINDOW = 64
"""Number of steps in the median that spikes are compared with."""
FEWEST = 8
"""Number of steps before a value may count as a spike."""

GROWTH = 3.0
"""Threshold of growth: a multiple of the lowest smoothed norm, or of the smoothed norm of the last alarm."""
RECOVERED = 1.5
"""Threshold of a recovery after an alarm: a multiple of the lowest smoothed norm."""
SMOOTHED = 9
"""Number of steps in the median that smooths the norm; the median is robust to four spikes."""
SUSTAINED = 10
"""Number of consecutive steps with a grown norm that raise an alarm."""


class Stability:
    """Detector of spikes and divergence, which gets the loss and gradient norm of each step in order.

    A spike is a value far above the median of the previous `WINDOW` values. Spikes are reported, and are normal in
    training. A run diverges if its smoothed gradient norm stays above `GROWTH` times its lowest value. A norm near this
    threshold crosses it many times. So after an alarm, the norm must first recover, or grow by `GROWTH` again.

    Source: Fan et al. 2024, HLAT (arXiv:2404.10630) watches the gradient norm; Takase et al. 2023 (arXiv:2312.16903) on
    spikes and norms; Megatron-LM's `rerun_state_machine.is_unexpectedly_large` has the factor of ten.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf
        self._grown = 0
        self._alarmed = 0.0  # smoothed norm of the last alarm; 0 if there was none, or after a recovery

    def see(self, loss: float, grad_norm: float) -> tuple[Literal["", "spike", "diverging"], str]:
        """Add a step; return the kind and the text of an alarm, both empty without an alarm.

        Values that are not finite are ignored, since these steps update nothing and are reported as skipped steps.
        """
        alarms = [self._spike("loss", loss, self._losses), self._spike("grad_norm", grad_norm, self._norms)]
        if math.isfinite(grad_norm):
            growth = self._growth()
            if growth:
                return "diverging", growth
        spikes = "; ".join(filter(None, alarms))
        if spikes:
            return "spike", spikes
        return "", ""

    def state(self) -> dict[str, Any]:
        """State of the detector for a checkpoint, as JSON values; floats are exact."""
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {
            "losses": [*self._losses],
            "norms": [*self._norms],
            "lowest": lowest,
            "grown": self._grown,
            "alarmed": self._alarmed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; an empty state resets the detector."""
        self._losses = deque(state.get("losses", ()), maxlen=WINDOW)
        self._norms = deque(state.get("norms", ()), maxlen=WINDOW)
        self._lowest = math.inf
        if state.get("lowest") is not None:
            self._lowest = state["lowest"]
        self._grown = state.get("grown", 0)
        self._alarmed = state.get("alarmed", 0.0)

    @staticmethod
    def _spike(name: str, value: float, before: deque[float]) -> str:
        if not math.isfinite(value):
            return ""
        usual = median(before) if len(before) >= FEWEST else math.inf
        text = f"{name} {value:.4g} is {value / usual:.0f} times the median of {len(before)} steps before it"
        is_spike = value > SPIKE * usual > 0
        before.append(value)
        return text if is_spike else ""

    def _growth(self) -> str:
        if len(self._norms) < SMOOTHED:
            return ""
        smoothed = median(list(self._norms)[-SMOOTHED:])
        self._lowest = min(self._lowest, smoothed)
        if smoothed <= RECOVERED * self._lowest:
            self._alarmed = 0.0
        self._grown += 1
        if smoothed <= GROWTH * max(self._lowest, self._alarmed):
            self._grown = 0
        if self._grown != SUSTAINED:
            return ""
        self._alarmed = smoothed
        self._grown = 0
        return (
            f"the gradient norm has been above {GROWTH:g} times its lowest for {SUSTAINED} steps: {smoothed:.4g} "
            f"against {self._lowest:.4g}, medians of {SMOOTHED} steps"
        )
