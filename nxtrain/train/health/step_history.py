"""Losses and gradient norms of the last steps, kept on the device until the host reads other numbers of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 240
"""Number of steps in the history, equal to the largest `metrics.log_every`.

A size that depended on `metrics.log_every` would change the graphs with the interval.
"""

SMALLEST_SCALE = 1.0
"""Loss scale below which the unscaled gradient of the mean loss has overflowed fp16."""

NO_TARGETS = -1.0
"""Gradient norm in the history of a step whose global batch has no target."""

_LARGEST = torch.tensor(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class PastStep:
    """Loss and gradient norm of a step, as read by the host; one of them is not finite if the step updated nothing."""

    step: int
    loss: float
    grad_norm: float

    @property
    def has_targets(self) -> bool:
        """False if no token of the global batch is a target, so that the step has no loss and updated nothing."""
        return self.grad_norm != NO_TARGETS

    @property
    def is_bad(self) -> bool:
        """True if the step updated nothing, because its loss or gradient norm is not finite."""
        return self.has_targets and not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def overflows(self, loss_scale: float) -> bool:
        """True if fp16 gradients overflowed at a loss scale of at least 1, which lowering the loss scale repairs."""
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm) and loss_scale >= SMALLEST_SCALE


@dataclass(frozen=True)
class BadSteps:
    """Steps whose loss or gradient norm was not finite.

    Args:
        steps: Numbers of the steps, ascending; empty for none.
        loss, grad_norm: Values of the last of these steps.
    """

    steps: tuple[int, ...] = ()
    loss: float = 0.0
    grad_norm: float = 0.0

    @staticmethod
    def among(past: list[PastStep]) -> BadSteps:
        """Select the bad steps among some steps."""
        bad = [numbers for numbers in past if numbers.is_bad]
        if not bad:
            return BadSteps()
        return BadSteps(tuple(numbers.step for numbers in bad), bad[-1].loss, bad[-1].grad_norm)


def not_finite(*values: Tensor) -> Tensor:
    """True if any of some () float32 tensors is infinite or NaN: () bool."""
    return ~torch.stack([value.abs() <= _LARGEST for value in values]).all()


_Note = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def _note(entries: Tensor, loss: Tensor, grad_norm: Tensor, num_targets: Tensor) -> None:
    grad_norm = torch.where(num_targets > 0, grad_norm, NO_TARGETS)
    entries.copy_(torch.cat([entries[1:], torch.stack([loss, grad_norm]).unsqueeze(0)]))


class StepHistory:
    """Ring buffer of losses and gradient norms on the device, newest last; the position implies the step number."""

    def __init__(self, put: Callable[[Tensor], Tensor], fuse: Callable[[_Note], _Note] = lambda note: note) -> None:
        self._note = fuse(_note)
        self.entries = put(torch.zeros(_STEPS, 2))

    @torch.no_grad()
    def note(self, loss: Tensor, grad_norm: Tensor, num_targets: Tensor) -> None:
        """Record the loss and the gradient norm of a step: () float32 each."""
        self._note(self.entries, loss, grad_norm, num_targets)

    def values(self) -> dict[str, Tensor]:
        """Ring buffer of the history as one tensor to fetch."""
        return {"history": self.entries}

    def take(self, step: int, last_read: int, read: dict[str, float]) -> list[PastStep]:
        """Decode the losses and norms of the steps after `last_read` up to `step`, and remove them from `read`."""
        values = [read.pop(f"history_{index}") for index in range(2 * _STEPS)]
        number = min(_STEPS, step - last_read)
        pairs = zip(values[::2], values[1::2], strict=True)
        return [PastStep(step - _STEPS + 1 + at, *pair) for at, pair in enumerate(pairs) if at >= _STEPS - number]
