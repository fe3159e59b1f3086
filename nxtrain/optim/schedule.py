"""Learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nxtrain.config.schema import RunConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warmup, then a half cosine down to a floor, then the floor.

    Args:
        lr: Highest learning rate.
        min_lr: Floor; unused when constant.
        warmup_steps: Steps from 0 to `lr`.
        decay_steps: Step at which the floor is reached.
        kind: `constant` stays at `lr` after the warmup.

    Source: Touvron et al. 2023 (arXiv:2302.13971) section 2.3.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 1
    kind: Literal["cosine", "constant"] = "cosine"

    @classmethod
    def of(cls, config: RunConfig) -> Schedule:
        """Schedule of a run's configuration."""
        optim = config.optim
        return cls(optim.lr, optim.min_lr, optim.warmup_steps, optim.decay_steps or config.train.steps, optim.schedule)

    def at(self, step: int) -> float:
        """Learning rate of an update, counted from 1; step 0 is before the first."""
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        if step >= self.decay_steps:
            return self.min_lr
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.min_lr + 0.5 * (self.lr - self.min_lr) * (1.0 + math.cos(math.pi * progress))
