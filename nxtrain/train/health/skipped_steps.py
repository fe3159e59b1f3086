"""Which of the last steps updated nothing, remembered on the device until the host asks anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 24
"""Steps that one float32 tells exactly."""

_NUM_WORDS = 10
"""Enough for the largest `metrics.log_every`; a size that followed it would make other graphs of other intervals."""

_LARGEST = torch.tensor(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class BadSteps:
    """Steps whose loss or gradient was not finite, as the host has read them.

    Args:
        steps: Their numbers, ascending; empty: none.
        loss, grad_norm: Of the last of them.
    """

    steps: tuple[int, ...] = ()
    loss: float = 0.0
    grad_norm: float = 0.0


def not_finite(*values: Tensor) -> Tensor:
    """Whether any of some () float32 tensors is infinite or NaN: () bool."""
    return ~torch.stack([value.abs() <= _LARGEST for value in values]).all()


class SkippedSteps:
    """A mark for each of the last steps, the latest at the end, so that no mark needs the number of its step.

    Args:
        put: Copies a host tensor to the device.
    """

    def __init__(self, put: Callable[[Tensor], Tensor]) -> None:
        self.marks = put(torch.zeros(_NUM_WORDS * _BITS))
        self.last = put(torch.zeros(2))
        self._bits = put(2.0 ** torch.arange(_BITS))

    @torch.no_grad()
    def note(self, skip: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Remember a step: () bool, () and () float32."""
        self.marks.copy_(torch.cat([self.marks[1:], skip.float().unsqueeze(0)]))
        self.last.copy_(torch.where(skip, torch.stack([loss, grad_norm]), self.last))

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """What to fetch, as () float32 tensors."""
        words = (self.marks.view(-1, _BITS) * self._bits).sum(dim=1)
        values = {f"skipped_{index}": words[index].clone() for index in range(_NUM_WORDS)}
        return values | {f"skipped_{name}": self.last[i].clone() for i, name in enumerate(("loss", "grad_norm"))}

    def take(self, step: int, last_read: int, read: dict[str, float]) -> BadSteps:
        """What the values tell of the steps after `last_read` up to `step`; takes them out of what was read."""
        words = [int(read.pop(f"skipped_{index}")) for index in range(_NUM_WORDS)]
        loss, grad_norm = read.pop("skipped_loss"), read.pop("skipped_grad_norm")
        marks = [word >> bit & 1 for word in words for bit in range(_BITS)]
        first = step - len(marks) + 1
        steps = tuple(first + place for place, mark in enumerate(marks) if mark and first + place > last_read)
        return BadSteps(steps, loss, grad_norm) if steps else BadSteps()
