"""Record of the last steps that updated nothing, kept on the device until the host reads its numbers anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 24
"""Number of 0/1 marks that one float32 holds exactly."""

_NUM_WORDS = 10
"""Number of float32 words, enough for the largest `metrics.log_every`.

A size that depended on `metrics.log_every` would change the graphs with the interval.
"""

_LARGEST = torch.tensor(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class BadSteps:
    """Steps whose loss or gradient was not finite, as read by the host.

    Args:
        steps: Numbers of the steps, ascending; empty: none.
        loss, grad_norm: Values of the last of these steps.
    """

    steps: tuple[int, ...] = ()
    loss: float = 0.0
    grad_norm: float = 0.0


def not_finite(*values: Tensor) -> Tensor:
    """True if any of some () float32 tensors is infinite or NaN: () bool."""
    return ~torch.stack([value.abs() <= _LARGEST for value in values]).all()


_Note = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def _note(marks: Tensor, last: Tensor, skip: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
    marks.copy_(torch.cat([marks[1:], skip.float().unsqueeze(0)]))
    last.copy_(torch.where(skip, torch.stack([loss, grad_norm]), last))


class SkippedSteps:
    """Ring of 0/1 marks on the device, newest last; step numbers are implied by position.

    Args:
        put: Copies a host tensor to the device.
        fuse: `Kernels.fuse` of the device.
    """

    def __init__(self, put: Callable[[Tensor], Tensor], fuse: Callable[[_Note], _Note] = lambda note: note) -> None:
        self._note = fuse(_note)
        self.marks = put(torch.zeros(_NUM_WORDS * _BITS))
        self.last = put(torch.zeros(2))
        self._bits = put(2.0 ** torch.arange(_BITS))

    @torch.no_grad()
    def note(self, skip: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a step: () bool, () and () float32."""
        self._note(self.marks, self.last, skip, loss, grad_norm)

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Marks, packed into words, and the last bad step's loss and norm, as () float32 tensors to fetch."""
        words = (self.marks.view(-1, _BITS) * self._bits).sum(dim=1)
        values = {f"skipped_{index}": words[index].clone() for index in range(_NUM_WORDS)}
        return values | {f"skipped_{name}": self.last[i].clone() for i, name in enumerate(("loss", "grad_norm"))}

    def take(self, step: int, last_read: int, read: dict[str, float]) -> BadSteps:
        """Decode the bad steps after `last_read` up to `step`, and remove the values from `read`."""
        words = [int(read.pop(f"skipped_{index}")) for index in range(_NUM_WORDS)]
        loss, grad_norm = read.pop("skipped_loss"), read.pop("skipped_grad_norm")
        marks = [word >> bit & 1 for word in words for bit in range(_BITS)]
        first = step - len(marks) + 1
        steps = tuple(first + place for place, mark in enumerate(marks) if mark and first + place > last_read)
        return BadSteps(steps, loss, grad_norm) if steps else BadSteps()
