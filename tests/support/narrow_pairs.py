"""Objectives on answers in bf16, next to transformers or PEFT in the same type, and both next to float64.

All compute from the same weights, which bf16 holds exactly. So rounding alone makes the distances from float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from nxtrain.nn.lora import without_adapters
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import TrainState, answer_log_probs, eval_step
from tests.support.labelled import DrawnLabelled, alone, given_of, kto_at, kto_of, share_of_labelled
from tests.support.lora import our_name, restored, with_adapters
from tests.support.models import changed, hf_model
from tests.support.pairs import (
    Answered,
    DrawnPairs,
    answers_alone,
    log_probs_of,
    objective_at,
    objective_of,
    references,
    share_of,
)
from tests.support.parity import Gradient, gradient, start, whole

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FirstStep:
    """First step of a run: log-probabilities of the answers, (A,), and the gradient by our names."""

    log_probs: Tensor
    grads: Tensors


@dataclass(frozen=True)
class OnRank:
    """First step of a run on one rank.

    Args:
        dp_rank: Index of the rows that the rank computes.
        gradient: Gradient of the step, with its loss.
        log_probs, base: Log-probabilities of the answers in these rows, with adapters and without; empty on stages
            before the last one.
        divergence: KL divergence from the reference over the global batch, of labelled answers.
    """

    dp_rank: int
    gradient: Gradient
    log_probs: Tensor
    base: Tensor
    divergence: float


def narrow_weights(drawn: DrawnPairs) -> Tensors:
    """Whole weights of a run as bf16 holds them."""
    return {name: weight.bfloat16().float() for name, weight in drawn.weights().items()}


def answers_of(drawn: DrawnPairs) -> Answered:
    """Answers of the first step, each alone."""
    if isinstance(drawn, DrawnLabelled):
        return alone(drawn.judged()[0], drawn.resolved.config.train.seq_len)
    return answers_alone(drawn.rows()[0])


def step_of_torch(drawn: DrawnPairs, dtype: torch.dtype) -> FirstStep:
    """First step of transformers or PEFT in some type, above weights that bitsandbytes restores in bf16 for qlora."""
    weights: Mapping[str, Tensor] = narrow_weights(drawn)
    if drawn.objective.method == "qlora":
        narrow = {name: weight.bfloat16() for name, weight in weights.items()}
        weights = {name: weight.float() for name, weight in restored(narrow).items()}
    model: nn.Module = hf_model(drawn.resolved, weights=weights)
    if drawn.objective.adapts:
        model = with_adapters(drawn.resolved, weights, model)
    model = model.to(dtype)
    if isinstance(drawn, DrawnLabelled):
        seq_len = drawn.resolved.config.train.seq_len
        loss = kto_of(drawn.objective, model, drawn.judged()[0], given_of(drawn)[0], seq_len)
    else:
        loss = objective_of(drawn.objective, model, answers_of(drawn), next(references(drawn)))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if drawn.objective.adapts:
        grads = {our_name(name): grad for name, grad in grads.items()}
    with torch.no_grad():
        return FirstStep(log_probs_of(model, answers_of(drawn)), grads)


def first_batch(state: TrainState, drawn: DrawnPairs) -> DeviceBatch:
    """This rank's part of the first step's batch."""
    rows = drawn.rows()[0]
    if isinstance(drawn, DrawnLabelled):
        return share_of_labelled(state, drawn, rows, given_of(drawn)[0])
    micro_batch, pairs_per_row = drawn.resolved.config.train.micro_batch, drawn.objective.pairs_per_row
    return share_of(state, rows, next(references(drawn)), micro_batch, pairs_per_row)


def on_rank(backend: Backend, drawn: DrawnPairs) -> OnRank:
    """First step of one rank."""
    state = start(backend, drawn.resolved, narrow_weights(drawn))
    batch = first_batch(state, drawn)
    found = base = _of_answers(state, batch)
    if drawn.objective.adapts:
        with without_adapters(state.model):
            base = _of_answers(state, batch)
    assert state.preferences is not None
    divergence, names = 0.0, state.preferences.sums
    if isinstance(drawn, DrawnLabelled):
        sums = dict(zip(names, map(sum, zip(*eval_step(state, batch), strict=True)), strict=True))
        divergence = float(sums["kl"] / sums["answers"])
    return OnRank(state.mesh.dp.rank, gradient(state, batch), found, base, divergence)


def _of_answers(state: TrainState, batch: DeviceBatch) -> Tensor:
    found = answer_log_probs(state, batch)
    parts = [own[pairs.lengths > 0] for own, pairs in zip(found, batch.pairs, strict=False)]
    return torch.cat([torch.zeros(0), *parts])


def of_all(ranks: Sequence[OnRank], drawn: DrawnPairs) -> FirstStep:
    """Our first step, whose loss is held to the formula in float64 at our own log-probabilities."""
    by_rows = {rank.dp_rank: rank for rank in ranks if len(rank.log_probs)}
    parts = [by_rows[dp_rank] for dp_rank in sorted(by_rows)]
    log_probs, given = (torch.cat([getattr(part, name) for part in parts]).double() for name in ("log_probs", "base"))
    config = drawn.objective
    if isinstance(drawn, DrawnLabelled):
        if config.stores_reference:
            stored = given_of(drawn)[0][0]
            assert stored is not None
            given = stored.double()
        loss = kto_at(config, log_probs - given, drawn.judged()[0], parts[0].divergence)
    else:
        stored = next(references(drawn))
        if stored is not None:
            given = stored.double()
        loss = objective_at(config, log_probs, answers_of(drawn).lengths, given)
    for rank in ranks:
        assert abs(rank.gradient.loss - float(loss)) < 2e-6, "the objective is computed in float32"
    return FirstStep(log_probs, whole([rank.gradient.shards for rank in ranks], drawn.resolved))


def distances(step: FirstStep, exact: FirstStep, drawn: DrawnPairs) -> tuple[list[float], float]:
    """Distances of the answers' log-probabilities, by the root of their targets, and of the gradient by its norm."""
    assert step.grads.keys() == exact.grads.keys()
    wrong = sum((step.grads[name].double() - grad).square().sum().item() for name, grad in exact.grads.items())
    norm = sum(grad.square().sum().item() for grad in exact.grads.values())
    of_answers = (step.log_probs - exact.log_probs) / answers_of(drawn).lengths.sqrt()
    return of_answers.tolist(), math.sqrt(wrong / norm)


def both_references(backend: Backend, drawn: DrawnPairs) -> list[Gradient]:
    """Gradients of the first step on one rank: by the frozen base as reference, and by a second copy of the base."""
    weights = narrow_weights(drawn)
    state = start(backend, drawn.resolved, weights)
    batch, copied = first_batch(state, drawn), weights
    if drawn.objective.method == "qlora":
        copied = restored({name: weight.to(state.precision.params) for name, weight in weights.items()})
    copy = start(backend, changed(drawn.resolved, finetune={"method": "full"}), copied)
    copy.model.requires_grad_(False)  # a reference is frozen, too: by that torch.matmul chooses between kernels
    given = answer_log_probs(copy, batch)
    if not given:  # a stage before the last one
        given = [torch.zeros_like(pairs.lengths) for pairs in batch.pairs]
    pairs = [replace(own, reference=reference) for own, reference in zip(batch.pairs, given, strict=True)]
    again = start(backend, drawn.resolved, weights)
    return [gradient(state, batch), gradient(again, replace(batch, pairs=pairs))]
