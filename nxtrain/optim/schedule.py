"""Schedule of the learning rate, weight decay or a beta, as a sequence of pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nxtrain.config.bounds import MAX_INT
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.config.schema import OptimConfig, RunConfig

INVERSE_SQRT_STEPS = 10_000
"""Time scale of inverse_sqrt without a warmup. Source: `get_inverse_sqrt_schedule` of transformers."""

Shape = Literal["linear", "cosine", "sqrt", "constant", "inverse_sqrt"]


@dataclass(frozen=True)
class Piece:
    """One piece of a schedule: a change of the learning rate, or of another value, over some steps.

    Args:
        steps: Length in steps.
        lr: Learning rate at the end; with `inverse_sqrt`, a lower bound.
        shape: Curve of the change. `sqrt` follows the square root of the finished share; `constant` stays at `lr`.
        timescale: With `inverse_sqrt`, steps after which the learning rate is divided by the square root of 2.

    Sources: Loshchilov and Hutter 2017 (arXiv:1608.03983) equation 5 for the cosine; Haegele et al. 2024
    (arXiv:2405.18392) section 3.2 for the root; Vaswani et al. 2017 (arXiv:1706.03762) equation 3 for the inverse root.
    """

    steps: int
    lr: float
    shape: Shape = "linear"
    timescale: int = INVERSE_SQRT_STEPS

    def at(self, done: int, first: float) -> float:
        """Learning rate after `done` steps of the piece, which begins at the learning rate `first`."""
        if self.shape == "constant":
            return self.lr if done else first
        if self.shape == "linear":
            return first + (self.lr - first) * done / self.steps
        if self.shape == "inverse_sqrt":
            return max(self.lr, first * math.sqrt(self.timescale / (done + self.timescale)))
        progress = done / self.steps
        if self.shape == "cosine":
            return self.lr + 0.5 * (first - self.lr) * (1.0 + math.cos(math.pi * progress))
        return self.lr + (first - self.lr) * (1.0 - math.sqrt(progress))


@dataclass(frozen=True)
class Schedule:
    """Schedule of the learning rate, or of another value. After the last piece, the last value remains.

    Args:
        pieces: The pieces, in order.
        first: Learning rate at the beginning of the first piece.
        rewarm_after: Step after which the learning rate is warmed up again; None for no second warmup.
        rewarm_steps: Number of steps of the second warmup, from 0 to the scheduled learning rate.
    """

    pieces: Sequence[Piece]
    first: float = 0.0
    rewarm_after: int | None = None
    rewarm_steps: int = 0

    @classmethod
    def of(cls, config: RunConfig, rewarm_after: int | None = None) -> Schedule:
        """Learning rate schedule of a run's configuration."""
        return cls.of_keys(config.optim, config.train.steps, rewarm_after)

    @classmethod
    def of_keys(cls, optim: ScheduleConfig, steps: int, rewarm_after: int | None = None) -> Schedule:
        """Learning rate schedule by the keys of [optim], for a run of a given number of steps."""
        if optim.schedule == "pieces":
            given = tuple(Piece(piece.steps, piece.lr, piece.shape) for piece in optim.pieces)
            return cls(given, 0.0, rewarm_after, optim.rewarm_steps)
        warmup = optim.num_warmup_steps(steps)
        pieces, first = _after_warmup(optim, warmup, steps), optim.lr
        if warmup:
            pieces, first = [Piece(warmup, optim.lr), *pieces], 0.0
        return cls(tuple(pieces), first, rewarm_after, optim.rewarm_steps)

    @classmethod
    def constant(cls, lr: float) -> Schedule:
        """Schedule with the same value in every step."""
        return cls((), lr)

    def at(self, step: int) -> float:
        """Learning rate of update `step`, counted from 1; step 0 is before the first update."""
        rate = self._of_pieces(step)
        if self.rewarm_after is not None and self.rewarm_after < step < self.rewarm_after + self.rewarm_steps:
            return rate * (step - self.rewarm_after) / self.rewarm_steps
        return rate

    def values(self) -> Iterator[float]:
        """Values before the first update, and of every update up to the end of the last piece."""
        yield self.first
        for _, first, piece in self._begun():
            yield from (piece.at(done, first) for done in range(1, piece.steps + 1))

    def describe(self, after: int = 0) -> str:
        """Description of the pieces after a step, as text."""
        words = []
        for begin, first, piece in self._begun():
            end = begin + piece.steps
            if end > after and piece.steps:
                words.append(_words(max(begin, after) + 1, end, first, piece))
        return "; ".join(words) or f"{self._of_pieces(after + 1):.3g}"

    def _of_pieces(self, step: int) -> float:
        rate = self.first
        for begin, first, piece in self._begun():
            if step < begin + piece.steps:
                return piece.at(step - begin, first)
            rate = piece.lr
        return rate

    def _begun(self) -> Iterator[tuple[int, float, Piece]]:
        """Iterate over the pieces, each with the last step before the piece, and the value at that step."""
        begin, rate = 0, self.first
        for piece in self.pieces:
            yield begin, rate, piece
            begin, rate = begin + piece.steps, piece.lr


def rule_schedules(optim: OptimConfig) -> dict[str, Schedule]:
    """Schedules of weight decay, betas and momentum, by name, for those that are not constant.

    The value of a piece is in its field `lr`.
    """
    given = {
        "weight_decay": (optim.weight_decay, optim.weight_decay_pieces),
        "beta1": (optim.betas[0], optim.beta1_pieces),
        "beta2": (optim.betas[1], optim.beta2_pieces),
        "muon_momentum": (optim.muon_momentum, optim.muon_momentum_pieces),
    }
    schedules = {}
    for name, (first, pieces) in given.items():
        if pieces:
            schedules[name] = Schedule(tuple(Piece(piece.steps, piece.to, piece.shape) for piece in pieces), first)
    return schedules


def numbers_of_update(optim: OptimConfig, step: int, lr: float) -> OptimConfig:
    """Copy of the keys of [optim] with the weight decay and betas of one AdamW update.

    Args:
        optim: Keys of the run.
        step: Number of the update, counted from 1.
        lr: Learning rate of the update.
    """
    constant = {"weight_decay": optim.weight_decay, "beta1": optim.betas[0], "beta2": optim.betas[1]}
    values = constant | {name: schedule.at(step) for name, schedule in rule_schedules(optim).items()}
    decay = values["weight_decay"]
    if optim.weight_decay_schedule != "constant":
        decay /= optim.highest_lr
    if optim.weight_decay_schedule == "corrected":
        decay *= lr
    return optim.model_copy(update={"weight_decay": decay, "betas": (values["beta1"], values["beta2"])})


def decay_factor(optim: OptimConfig) -> str:
    """Effective weight decay factor of an update, as text."""
    decay, highest = f"{optim.weight_decay:.3g}", f"{optim.highest_lr:.3g}"
    if optim.weight_decay_pieces:
        decay = "weight_decay"
    rate = {"constant": "lr", "corrected": f"lr^2 / {highest}", "decoupled": f"lr / {highest}"}
    return f"{decay} x {rate[optim.weight_decay_schedule]}"


def _after_warmup(optim: ScheduleConfig, warmup: int, steps: int) -> list[Piece]:
    if optim.schedule == "constant":
        return [Piece(MAX_INT, optim.lr, "constant")]
    if optim.schedule == "inverse_sqrt":
        return [Piece(MAX_INT, optim.min_lr, "inverse_sqrt", warmup or INVERSE_SQRT_STEPS)]
    if optim.schedule == "wsd":
        decay = optim.num_decay_steps(steps)
        stable = Piece(steps - warmup - decay, optim.lr, "constant")
        return [stable, Piece(decay, optim.min_lr, optim.decay_shape)]
    shape: Shape = "cosine"
    if optim.schedule == "linear":
        shape = "linear"
    return [Piece((optim.decay_steps or steps) - warmup, optim.min_lr, shape)]


def _words(first_step: int, last_step: int, first: float, piece: Piece) -> str:
    steps = f"steps {first_step:,} to {last_step:,}"
    if last_step >= MAX_INT:
        steps = f"from step {first_step:,}"
    if piece.shape == "constant" or piece.lr == first:
        return f"{steps}: {piece.lr:.3g}"
    direction = "up"
    if piece.lr < first:
        direction = "down"
    return f"{steps}: {direction} to {piece.lr:.3g} ({piece.shape})"
