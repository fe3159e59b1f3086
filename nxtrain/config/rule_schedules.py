"""Keys of [optim] for schedules of weight decay and betas, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from nxtrain.common.errors import Problem
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.config.section import Beta, Section


class BetaPiece(Section):
    """An entry of optim.beta1_pieces, beta2_pieces or muon_momentum_pieces."""

    steps: Annotated[int, Field(gt=0, le=1 << 20)]
    """Number of updates; the device holds a value for each."""
    to: Beta
    """Value at the last of these updates; the first piece begins at the key without `_pieces`."""
    shape: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Curve from the value before to the new one; constant: the new value from the first update on."""


class DecayPiece(BetaPiece):
    """An entry of optim.weight_decay_pieces."""

    to: NonNegativeFloat


class RuleSchedulesConfig(ScheduleConfig):
    """Keys of [optim] that give each update its learning rate, its weight decay and its betas."""

    weight_decay_schedule: Literal["constant", "corrected", "decoupled"] = "constant"
    """Factor of weight_decay in an update: constant, lr, as in AdamW; corrected, lr^2 / highest lr, as in AdamC;
    decoupled, lr / highest lr."""
    weight_decay_pieces: tuple[DecayPiece, ...] = Field(default=(), strict=False)
    """Tables of steps, to and shape, by which weight_decay changes over the updates; then the last value stays."""
    beta1_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Tables of steps, to and shape, by which betas[0] changes; the bias correction has the product of all betas."""
    beta2_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Tables of steps, to and shape, by which betas[1] changes."""


def rule_schedule_problems(optim: RuleSchedulesConfig) -> Iterator[Problem]:
    """Problems of the schedules of weight decay and betas."""
    if optim.weight_decay_schedule != "constant" and not optim.highest_lr:
        reason = f"{optim.weight_decay_schedule} divides by the highest learning rate, which is 0"
        yield Problem("optim.weight_decay_schedule", reason, hint="use a positive optim.lr, or constant")
