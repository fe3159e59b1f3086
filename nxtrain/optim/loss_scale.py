"""Dynamic loss scale for fp16, which keeps small gradients above zero; lowered by an overflow, raised after many steps.

The scale multiplies the gradient of a micro-batch's mean loss, and the update divides by it. An overflow anywhere makes
the global gradient norm infinite. All ranks know the norm, so all of them skip the step.

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
        state: (2,) float32, the loss scale, and the number of steps without overflow since its last change.

    Args:
        put: Copies a host tensor to the device.
        first: Initial loss scale.
        every: Number of steps without overflow after which the scale doubles.
        positions: Number of positions of a micro-batch.
    """

    def __init__(self, put: Callable[[Tensor], Tensor], first: float, every: int, positions: int) -> None:
        self.state = put(torch.tensor([first, 0.0]))
        self._every, self._positions = every, positions

    def per_position(self) -> Tensor:
        """Factor for the gradient of a loss summed over positions, () float32."""
        return self.state[0] / self._positions

    @torch.no_grad()
    def update(self, overflowed: Tensor) -> None:
        """Count a step, and update the loss scale.

        Args:
            overflowed: () bool, True if the gradient is not finite.
        """
        scale, steps = self.state.unbind()
        larger = scale * GROWTH
        full = (steps + 1 == self._every) & ~overflowed
        steps = torch.where(overflowed | full, torch.zeros_like(steps), steps + 1)
        grown = torch.where(full & larger.isfinite(), larger, scale)
        self.state.copy_(torch.stack([torch.where(overflowed, scale * BACKOFF, grown), steps]))

    def values(self) -> dict[str, Tensor]:
        """Device values to fetch for a step record."""
        return {"loss_scale": self.state[0]}

    def kept(self, fetch: Callable[[Mapping[str, Tensor]], dict[str, float]], num_updates: Tensor) -> dict[str, float]:
        """State for a checkpoint, with the number of updates, which does not count skipped steps."""
        return fetch({"scale": self.state[0], "steps": self.state[1], "num_updates": num_updates})

    @torch.no_grad()
    def restore(self, kept: Mapping[str, float], put: Callable[[Tensor], Tensor]) -> None:
        """Restore the state returned by `kept`."""
        self.state.copy_(put(torch.tensor([kept["scale"], kept["steps"]])))
