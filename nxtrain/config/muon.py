"""Keys of the choice between AdamW and Muon, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat

from nxtrain.common.errors import Problem
from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.config.section import Beta, PositiveInt, Section


class MuonConfig(Section):
    """Keys of [optim] that choose the optimizer, and those of Muon."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer; muon updates the matrices of the blocks, and AdamW all other parameters."""
    adam_lr: NonNegativeFloat = 0.0
    """With muon, highest learning rate of the parameters that AdamW updates, which follows the schedule of lr; 0:
    lr."""
    muon_scale: Literal["original", "moonlight"] = "moonlight"
    """Factor of Muon's update by a matrix's shape: original, sqrt(max(1, rows / columns)), or moonlight, 0.2
    sqrt(max(rows, columns)), for which learning rates of AdamW fit."""
    muon_momentum: Beta = 0.95
    """Decay of Muon's running mean of the gradient."""
    muon_momentum_pieces: tuple[BetaPiece, ...] = Field(default=(), strict=False)
    """Tables of steps, to and shape, by which muon_momentum changes, such as a warmup from 0.85 to 0.95."""
    muon_nesterov: bool = True
    """Muon's update looks one step ahead of its running mean."""
    muon_steps: PositiveInt = 5
    """Newton-Schulz steps of each update."""
    muon_precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the products of Newton-Schulz steps."""


def muon_problems(optim: MuonConfig, *, lr: float, method: str) -> Iterator[Problem]:
    """Problems of the choice of an optimizer.

    Args:
        optim: Keys of the optimizer.
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
        reason = f"orthogonalizes whole weights, and finetune.method={method} trains their thin factors"
        yield Problem("optim.name", reason, hint="use optim.name=adamw, or finetune.method=full")
