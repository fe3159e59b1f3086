"""torch's optimizers with weight decay, betas and momentum that change: numbers of their groups, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.config.schema import OptimConfig


def value_at(start: float, pieces: Sequence[BetaPiece], step: int) -> float:
    """Value of an update, counted from 1, after a walk along the pieces."""
    for piece in pieces:
        done = min(1.0, step / piece.steps)
        share = {"linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done), "sqrt": math.sqrt(done)}
        value = start + (piece.to - start) * share.get(piece.shape, 1.0)
        if step <= piece.steps:
            return value
        start, step = piece.to, step - piece.steps
    return start


def follow_by_hand(
    optimizer: torch.optim.Optimizer,
    optim: OptimConfig,
    highest: float,
    share_of: Callable[[int], float] = lambda step: 1.0,
) -> None:
    """Change the groups of torch's AdamW or Muon before each of its steps.

    torch's bias correction has the betas of the step alone. AdamW of a group with another rate and another eps is AdamW
    with the means over the sum of the weights of all their values.

    Args:
        optimizer: The optimizer; a group whose `decays` is false has no weight decay.
        optim: Keys of the run.
        highest: Highest learning rate of the optimizer.
        share_of: Share of the learning rate of an update, counted from 1, in the highest.
    """
    sums, count = [0.0, 0.0], 0

    def before(*_: object) -> None:
        nonlocal count
        count += 1
        betas = []
        for index, pieces in enumerate((optim.beta1_pieces, optim.beta2_pieces)):
            beta = value_at(optim.betas[index], pieces, count)
            sums[index] = beta * sums[index] + 1 - beta
            betas.append(beta)
        share = share_of(count)
        factor = {"constant": 1.0, "corrected": share, "decoupled": 1 / highest}[optim.weight_decay_schedule]
        decay = value_at(optim.weight_decay, optim.weight_decay_pieces, count) * factor
        for group in optimizer.param_groups:
            group |= {"lr": highest * share, "weight_decay": decay * group.get("decays", True)}
            if "momentum" in group:
                group["momentum"] = value_at(optim.muon_momentum, optim.muon_momentum_pieces, count)
            elif optim.beta1_pieces or optim.beta2_pieces:
                of_mean, of_squares = (1 - beta**count for beta in betas)
                root = math.sqrt(sums[1] / of_squares)
                rate = highest * share * root * of_mean / sums[0]
                group |= {"betas": tuple(betas), "eps": optim.eps * root, "lr": rate}
                group["weight_decay"] *= highest * share / rate

    optimizer.register_step_pre_hook(before)


def draw_rule(rng: Random) -> dict[str, Any]:
    """Keys of a weight decay and betas that change in some steps, or of none."""
    if rng.random() < 0.6:
        return {}
    shapes = ("linear", "cosine", "sqrt", "constant")

    def pieces(*values: float) -> list[dict[str, Any]]:
        return [{"steps": rng.randint(1, 2), "to": rng.choice(values), "shape": rng.choice(shapes)} for _ in range(2)]

    keys: dict[str, Any] = {"optim.weight_decay_schedule": rng.choice(("constant", "decoupled"))}
    keys["optim.weight_decay"] = {"constant": 0.5, "decoupled": 1e-3}[keys["optim.weight_decay_schedule"]]
    if rng.random() < 0.7:
        keys["optim.weight_decay_pieces"] = pieces(0.0, 2 * keys["optim.weight_decay"])
    if rng.random() < 0.7:
        keys |= {"optim.beta1_pieces": pieces(0.5, 0.95), "optim.beta2_pieces": pieces(0.8, 0.999)}
    return keys
