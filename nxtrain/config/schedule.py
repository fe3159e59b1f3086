"""Configuration keys of the learning rate schedule, the lengths of its phases in steps, and the rules between keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from nxtrain.common.errors import Problem
from nxtrain.config.section import NonNegativeInt, PositiveInt, Section

Ratio = Annotated[float, Field(ge=0, lt=1)]
Curve = Literal["linear", "cosine", "sqrt"]

WSD_DECAY_RATIO = 0.1
"""Default share of the run in which wsd (warmup-stable-decay) decays. Source: Hu et al. 2024 (arXiv:2404.06395) 4.2."""


class PieceConfig(Section):
    """One piece of the learning rate schedule in optim.pieces."""

    steps: PositiveInt
    """Number of updates in this piece."""
    lr: NonNegativeFloat
    """Learning rate at the end of this piece. The first piece begins at 0."""
    shape: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Curve from the previous learning rate to lr. constant uses lr from the first step on."""


class ScheduleConfig(Section):
    """Keys of [optim] for the learning rate schedule."""

    lr: NonNegativeFloat = 3e-4
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 3e-5
    """Learning rate at the end of the decay, and lower bound of inverse_sqrt."""
    schedule: Literal["cosine", "constant", "linear", "wsd", "inverse_sqrt", "pieces"] = "cosine"
    """Learning rate schedule after the warmup. wsd is constant, then decays. pieces follows optim.pieces."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup from 0 to lr."""
    warmup_ratio: Ratio = 0.0
    """Share of the run for the warmup, in place of warmup_steps."""
    decay_steps: NonNegativeInt = 0
    """Step at which cosine and linear reach min_lr; 0 for train.steps. With wsd, number of steps of the final decay; 0
    for decay_ratio."""
    decay_ratio: Ratio = 0.0
    """With wsd, share of the run for the decay, in place of decay_steps; 0 for a tenth."""
    decay_shape: Curve = "linear"
    """With wsd, shape of the decay. sqrt falls with the square root of the finished share, fast at first."""
    pieces: tuple[PieceConfig, ...] = Field(default=(), strict=False)
    """With schedule=pieces, the pieces of the schedule, as tables of steps, lr and shape. After the last piece, the
    last learning rate remains."""
    rewarm_steps: NonNegativeInt = 0
    """Steps of linear warmup after a resume from another run's checkpoint, or after this key was added."""

    @property
    def highest_lr(self) -> float:
        """Highest learning rate of the run."""
        if self.schedule == "pieces":
            return max((piece.lr for piece in self.pieces), default=0.0)
        return self.lr

    def num_warmup_steps(self, steps: int) -> int:
        """Number of warmup steps in a run of `steps` updates."""
        return self.warmup_steps or round(self.warmup_ratio * steps)

    def num_decay_steps(self, steps: int) -> int:
        """Number of decay steps of wsd in a run of `steps` updates."""
        return self.decay_steps or round((self.decay_ratio or WSD_DECAY_RATIO) * steps)


def schedule_problems(optim: ScheduleConfig, steps: int) -> Iterator[Problem]:
    """Check a learning rate schedule, and yield the problems.

    Args:
        optim: Keys of the schedule.
        steps: Updates of the run; 0 if not known yet.
    """
    for name in ("warmup", "decay"):
        length, ratio = getattr(optim, f"{name}_steps"), getattr(optim, f"{name}_ratio")
        if length and ratio:
            reason = f"{ratio} of the run and optim.{name}_steps={length} are two lengths of the {name}"
            yield Problem(f"optim.{name}_ratio", reason, hint=f"use 0 for one of them, such as optim.{name}_steps=0")
    if optim.decay_ratio and optim.schedule != "wsd":
        reason = f"is for schedule=wsd only, but schedule={optim.schedule}"
        yield Problem("optim.decay_ratio", reason, hint="use 0, or optim.schedule=wsd")
    if optim.schedule not in ("constant", "pieces") and optim.min_lr > optim.lr:
        reason = f"min_lr={optim.min_lr} exceeds lr={optim.lr}"
        yield Problem("optim.min_lr", reason, hint=f"use optim.min_lr={optim.lr / 10} or less than lr")
    yield from _piece_problems(optim)
    yield from _length_problems(optim, steps)


def _piece_problems(optim: ScheduleConfig) -> Iterator[Problem]:
    if optim.schedule != "pieces":
        if optim.pieces:
            reason = f"{len(optim.pieces)} pieces have no effect with schedule={optim.schedule}"
            yield Problem("optim.pieces", reason, hint="use optim.schedule=pieces, or optim.pieces=[]")
        return
    if not optim.pieces:
        hint = 'such as optim.pieces=[{steps = 100, lr = 3e-4}, {steps = 900, lr = 0.0, shape = "sqrt"}]'
        yield Problem("optim.pieces", "schedule=pieces has no pieces", hint=hint)
    for key in ("warmup_steps", "warmup_ratio", "decay_steps"):
        value = getattr(optim, key)
        if value:
            reason = f"{value} has no effect, since optim.pieces define the whole schedule"
            yield Problem(f"optim.{key}", reason, hint=f"use optim.{key}=0, and a piece that rises or falls")


def _length_problems(optim: ScheduleConfig, steps: int) -> Iterator[Problem]:
    """Check that the warmup and the decay fit into the run, and yield the problems."""
    if optim.schedule == "pieces":
        return
    warmup = optim.num_warmup_steps(steps)
    if optim.schedule == "wsd":
        if steps and warmup + optim.num_decay_steps(steps) > steps:
            decay = optim.num_decay_steps(steps)
            reason = f"a decay of {decay} steps exceeds train.steps={steps}"
            if warmup:
                reason = f"a warmup of {warmup} and a decay of {decay} steps exceed train.steps={steps}"
            hint = "use fewer, such as optim.decay_ratio=0.1, or more train.steps"
            yield Problem("optim.decay_steps", reason, hint=hint)
        return
    end, name = optim.decay_steps, "optim.decay_steps"
    if not end:
        end, name = steps, "train.steps"
    if end and warmup > end:
        hint = "use fewer, or set optim.decay_steps to the length of the whole run that these steps begin"
        yield Problem("optim.warmup_steps", f"{warmup} exceeds {name}={end}", hint=hint)
