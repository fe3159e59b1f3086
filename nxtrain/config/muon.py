"""Configuration keys that select AdamW or Muon, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat

from nxtrain.common.errors import Problem
from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.config.section import Beta, PositiveInt, Section


class MuonConfig(Section):
    """Keys of [optim] that select the optimizer, and the keys of Muon."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. With muon, Muon updates the matrices of the blocks, and AdamW updates all other parameters."""
    adam_lr: NonNegativeFloat = 0.0
    """With muon, highest learning rate of the parameters that AdamW updates, on the schedule of lr. 0 uses lr."""
    muon_scale: Literal["original", "moonlight"] = "moonlight"
    """Scale of Muon's update by the shape of a matrix. original is sqrt(max(1, rows / columns)). moonlight is 0.2
    sqrt(max(rows, columns)), which suits learning rates of AdamW."""
    muon_momentum: Beta = 0.95
    """Momentum of Muon: decay of its moving average of the gradient."""
    muon_momentum_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Schedule of muon_momentum, as tables of steps, to and shape; for example a warmup from 0.85 to 0.95."""
    muon_nesterov: bool = True
    """Use Nesterov momentum in Muon."""
    muon_steps: PositiveInt = 5
    """Newton-Schulz iterations of each Muon update."""
    muon_precision: Literal["fp32", "bf16"] = "fp32"
    """Number type of the matrix products in Newton-Schulz iterations."""


def muon_problems(optim: MuonConfig, *, lr: float, method: str) -> Iterator[Problem]:
    """Check the choice of an optimizer, and yield the problems.

    Args:
        optim: Section [optim].
        lr: Value of optim.lr.
        method: Value of finetune.method.
    """
    if optim.name != "muon":
        for key in MuonConfig.model_fields:
            if key != "name" and getattr(optim, key) != MuonConfig.model_fields[key].default:
                reason = f"belongs to Muon, but optim.name={optim.name}"
                yield Problem(f"optim.{key}", reason, hint="leave it out, or use optim.name=muon")
        return
    if optim.adam_lr and not lr:
        reason = f"follows the schedule of optim.lr, which is 0, so that adam_lr={optim.adam_lr} is never reached"
        yield Problem("optim.adam_lr", reason, hint="use a positive optim.lr, or leave optim.adam_lr out")
    if method != "full":
        reason = f"orthogonalizes whole weights, and finetune.method={method} trains low-rank factors of them"
        yield Problem("optim.name", reason, hint="use optim.name=adamw, or finetune.method=full")
