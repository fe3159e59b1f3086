"""Schedules of drawn runs: weight decay, betas and momentum by step in torch's optimizers, and ramps of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Any

import torch

from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.config.schema import OptimConfig, TrainConfig


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


END_ID = 0
"""Id that ends a document, which no drawn row holds."""

ROW_LENGTHS = (16, 18, 20, 24, 30, 36, 48)
"""Tokens of a row. After steps of four tokens, a loss of transformers in float32 is 6e-6 from that in float64."""

LAST_STEPS = 2
"""Most steps after the ramps."""


def draw_ramps(rng: Random, divides: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides for a run whose batches, or sequences, or both grow; stages end anywhere in a step.

    Args:
        divides: Number that divides the tokens of a row.
        given: Overrides of the draw.
    """
    seq_len = rng.choice([length for length in ROW_LENGTHS if length % divides == 0])
    unit = given["train.micro_batch"] * given["parallel.dp"]
    kinds = rng.choice((("batch",), ("seq",), ("batch", "seq"), ("batch", "seq")))
    if given.get("model.config.rope_scaling", {}).get("rope_type") == "dynamic":
        kinds = ("batch",)  # of short rows, transformers computes other frequencies; ours are those of train.seq_len
    values: dict[str, Any] = {"train.seq_len": seq_len, "train.global_batch": unit * rng.randint(1, 3)}
    if "batch" in kinds:
        values["train.batch_ramp"] = _batch_stages(rng, unit, seq_len)
    if "seq" in kinds:
        lengths = [length for length in range(1, seq_len) if seq_len % length == 0]
        chosen = sorted(rng.sample(lengths, rng.randint(1, 2)))
        most = 2 * values["train.global_batch"] * seq_len
        values["train.seq_ramp"] = [{"seq_len": length, "tokens": rng.randint(1, most)} for length in chosen]
        values |= {"data.doc_mask": True, "data.tokenizer": "tokenizer"}
        values["model.config.vocab_size"] = max(END_ID + 3, given["model.config.vocab_size"])
    return values


def _batch_stages(rng: Random, unit: int, seq_len: int) -> list[dict[str, int]]:
    stages = []
    for _ in range(rng.randint(1, 2)):
        batch = unit * rng.randint(1, 3)
        rows = rng.randint(1, 2 * batch)
        length = {"samples": rows}
        if rng.random() < 0.5:
            length = {"tokens": rows * seq_len - rng.randrange(seq_len)}
        stages.append({"global_batch": batch, **length})
    return stages


def num_steps(rng: Random, train: TrainConfig) -> int:
    """Steps of both ramps and a few after them."""
    ends = [end for of_ramp in _ends(train) for end in of_ramp]
    steps, seen = 0, 0
    while seen < max(ends):
        steps += 1
        seen = train.seq_len * sum(rows for rows, _ in sizes(train, steps))
    return steps + rng.randint(1, LAST_STEPS)


def sizes(train: TrainConfig, steps: int) -> list[tuple[int, int]]:
    """Rows of each step and tokens of a sequence, by the tokens that the steps before have seen."""
    of_batch, of_length = _ends(train)
    batches = [*(stage.global_batch for stage in train.batch_ramp), train.global_batch]
    lengths = [*(stage.seq_len for stage in train.seq_ramp), train.seq_len]
    results, seen = [], 0
    for _ in range(steps):
        rows = batches[_passed(of_batch, seen)]
        results.append((rows, lengths[_passed(of_length, seen)]))
        seen += rows * train.seq_len
    return results


def _ends(train: TrainConfig) -> tuple[list[int], list[int]]:
    """Tokens seen at the end of each stage, of the batch and of the sequence length."""
    of_batch = accumulate(stage.tokens or stage.samples * train.seq_len for stage in train.batch_ramp)
    of_length = accumulate(stage.tokens for stage in train.seq_ramp)
    return [*of_batch], [*of_length]


def _passed(ends: Sequence[int], seen: int) -> int:
    return sum(seen >= end for end in ends)
