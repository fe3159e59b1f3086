"""Factor of the loss that keeps small fp16 gradients above zero, lowered by each overflow and raised after many steps.

The factor multiplies the gradient of the mean loss of a micro-batch. The update divides by the factor. An overflow
anywhere makes the norm of the whole gradient infinite, which all ranks know, so that all of them skip the step.

Source: Micikevicius et al. 2018 (arXiv:1710.03740) section 3.2; torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Loss scale on the device, equal on all ranks.

    Attributes:
        state: (2,) float32, the factor, and the steps without overflow since the last change.

    Args:
        put: Copies a host tensor to the device.
        first: First factor.
        every: Steps without overflow after which the factor doubles.
        positions: Positions of a micro-batch.
    """

    def __init__(self, put: Callable[[Tensor], Tensor], first: float, every: int, positions: int) -> None:
        self.state = put(torch.tensor([first, 0.0]))
        self._every, self._positions = every, positions

    def per_position(self) -> Tensor:
        """() float32, factor of the gradient of a sum over positions."""
        return self.state[0] / self._positions

    @torch.no_grad()
    def update(self, overflowed: Tensor) -> None:
        """Count a step.

        Args:
            overflowed: () bool, the gradient is not finite.
        """
        scale, steps = self.state.unbind()
        larger = scale * GROWTH
        full = (steps + 1 == self._every) & ~overflowed
        steps = torch.where(overflowed | full, torch.zeros_like(steps), steps + 1)
        grown = torch.where(full & larger.isfinite(), larger, scale)
        self.state.copy_(torch.stack([torch.where(overflowed, scale * BACKOFF, grown), steps]))

    def values(self) -> dict[str, Tensor]:
        """Values to fetch with a record."""
        return {"loss_scale": self.state[0]}

    def kept(self, fetch: Callable[[Mapping[str, Tensor]], dict[str, float]], num_updates: Tensor) -> dict[str, float]:
        """State for a checkpoint, with the number of updates, which leaves out skipped steps."""
        return fetch({"scale": self.state[0], "steps": self.state[1], "num_updates": num_updates})

    @torch.no_grad()
    def restore(self, kept: Mapping[str, float], put: Callable[[Tensor], Tensor]) -> None:
        """Restore a result of `kept`."""
        self.state.copy_(put(torch.tensor([kept["scale"], kept["steps"]])))
