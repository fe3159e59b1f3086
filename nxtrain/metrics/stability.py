"""Tells from the logged losses and gradient norms when a run leaves its course."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

SPIKE = 10.0
"""A value so many times the median of those before it is a spike."""
WINDOW = 64
"""Records whose median counts."""
FEWEST = 8
"""Records before which nothing is a spike."""

GROWTH = 3.0
"""A smoothed norm so many times its lowest is growth."""
SMOOTHED = 9
"""Records whose median is the smoothed norm: four spikes among them change nothing."""
SUSTAINED = 10
"""Records in a row whose smoothed norm has grown, before that is an alarm."""


class Stability:
    """Looks at one record after the other; what it says depends on them alone.

    A value is a spike against the median of the `WINDOW` values before it; spikes are told and belong to training. A
    run diverges when its gradient norm, smoothed, stays above `GROWTH` times the lowest that it ever had.

    Source: Fan et al. 2024, HLAT (arXiv:2404.10630) watches the gradient norm; Takase et al. 2023 (arXiv:2312.16903) on
    spikes and norms; Megatron-LM's `rerun_state_machine.is_unexpectedly_large` has the factor of ten.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf
        self._grown = 0

    def see(self, loss: float, grad_norm: float) -> tuple[Literal["", "spike", "diverging"], str]:
        """Take in a record: the kind of its alarm and what to tell of it; both empty if all is well.

        Values that are not finite are left out, since such steps update nothing and are told elsewhere.
        """
        told = [self._spike("loss", loss, self._losses), self._spike("grad_norm", grad_norm, self._norms)]
        if math.isfinite(grad_norm) and (growth := self._growth()):
            return "diverging", growth
        spikes = "; ".join(filter(None, told))
        return ("spike", spikes) if spikes else ("", "")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it; floats survive exactly."""
        lowest = self._lowest if math.isfinite(self._lowest) else None
        return {"losses": [*self._losses], "norms": [*self._norms], "lowest": lowest, "grown": self._grown}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; from nothing, begin anew."""
        self._losses = deque(state.get("losses", ()), maxlen=WINDOW)
        self._norms = deque(state.get("norms", ()), maxlen=WINDOW)
        lowest = state.get("lowest")
        self._lowest = math.inf if lowest is None else lowest
        self._grown = state.get("grown", 0)

    @staticmethod
    def _spike(name: str, value: float, before: deque[float]) -> str:
        if not math.isfinite(value):
            return ""
        usual = median(before) if len(before) >= FEWEST else math.inf
        told = f"{name} {value:.4g} is {value / usual:.0f} times the median of {len(before)} records before it"
        is_spike = value > SPIKE * usual > 0
        before.append(value)
        return told if is_spike else ""

    def _growth(self) -> str:
        if len(self._norms) < SMOOTHED:
            return ""
        smoothed = median(list(self._norms)[-SMOOTHED:])
        self._lowest = min(self._lowest, smoothed)
        self._grown = self._grown + 1 if smoothed > GROWTH * self._lowest else 0
        if self._grown != SUSTAINED:
            return ""
        return (
            f"the gradient norm has been above {GROWTH:g} times its lowest for {SUSTAINED} records: {smoothed:.4g} "
            f"against {self._lowest:.4g}, medians of {SMOOTHED} records"
        )
