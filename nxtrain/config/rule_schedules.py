"""Configuration keys for schedules of weight decay and betas, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from nxtrain.common.errors import Problem
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.config.section import Beta, Section


class BetaPiece(Section):
    """One piece of a schedule in optim.beta1_pieces, beta2_pieces or muon_momentum_pieces."""

    steps: Annotated[int, Field(gt=0, le=1 << 20)]
    """Number of updates in this piece. The device stores one value for each update."""
    to: Beta
    """Value at the last update of this piece. The first piece begins at the value of the key without `_pieces`."""
    shape: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Curve from the previous value to the new one. constant uses the new value from the first update on."""


class DecayPiece(BetaPiece):
    """One piece of the weight decay schedule in optim.weight_decay_pieces."""

    to: NonNegativeFloat


class RuleSchedulesConfig(ScheduleConfig):
    """Keys of [optim] for the schedules of learning rate, weight decay and betas."""

    weight_decay_schedule: Literal["constant", "corrected", "decoupled"] = "constant"
    """Factor of weight_decay in an update. constant: lr, as in AdamW. corrected: lr^2 / highest lr, as in AdamC.
    decoupled: lr / highest lr."""
    weight_decay_pieces: tuple[DecayPiece, ...] = Field(default=(), strict=False)
    """Schedule of weight_decay, as tables of steps, to and shape. After the last piece, the last value remains."""
    beta1_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Schedule of betas[0], as tables of steps, to and shape. The bias correction uses the product of all betas so
    far."""
    beta2_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Schedule of betas[1], as tables of steps, to and shape."""


def rule_schedule_problems(optim: RuleSchedulesConfig) -> Iterator[Problem]:
    """Check the schedules of weight decay and betas, and yield the problems."""
    if optim.weight_decay_schedule != "constant" and not optim.highest_lr:
        reason = f"{optim.weight_decay_schedule} divides by the highest learning rate, which is 0"
        yield Problem("optim.weight_decay_schedule", reason, hint="use a positive optim.lr, or constant")
