"""Drawn runs in bf16: their distance from float32, beside that of transformers in bf16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import IGNORE_INDEX
from tests.support.drawn import Drawn
from tests.support.drawn_runs import first_weights
from tests.support.models import hf_model
from tests.support.parity import gradient, local_pair, reference, run_ours, start, whole

WORSE = 1.5
"""Most that our error may exceed transformers'."""


@dataclass(frozen=True)
class Distance:
    """Distances from float32 transformers, which starts from the same bf16 weights.

    Args:
        gradient: Of the first step's gradient, |found - exact| / |exact| over the whole model.
        losses: Of each step, times the root of the tokens, since the roundings of many tokens cancel in their mean.
    """

    gradient: float
    losses: tuple[float, ...]


def distances(backend: Backend, drawn: Drawn) -> tuple[Distance, Distance]:
    """Ours, and that of transformers in bf16 with AdamW on a float32 copy of its weights."""
    weights = {name: weight.bfloat16().float() for name, weight in first_weights(drawn).items()}
    resolved, data = drawn.resolved, drawn.batches()
    exact = reference(resolved, drawn.steps, data=data, weights=weights)
    exact_grads = _gradient(drawn, weights, torch.float32)

    state = start(backend, resolved, weights)
    found = gradient(state, local_pair(state, data[0], resolved.config.train.micro_batch))
    course = run_ours(backend, resolved, drawn.steps, weights, data)
    theirs = _mixed_losses(drawn, weights)
    scales = [math.sqrt((targets != IGNORE_INDEX).sum().item()) for _, targets in data]

    def of(losses: Sequence[float], grads: Mapping[str, Tensor]) -> Distance:
        differences = (abs(a - b) * scale for a, b, scale in zip(losses, exact.losses, scales, strict=True))
        return Distance(_relative(grads, exact_grads), tuple(differences))

    return (
        of(course.losses, whole([found.shards], resolved)),
        of(theirs, _gradient(drawn, weights, torch.bfloat16)),
    )


def root_mean_square(numbers: Sequence[float]) -> float:
    """Root of the mean of the squares."""
    return math.sqrt(sum(x * x for x in numbers) / len(numbers))


def _relative(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    wrong = sum((found[name].double() - grad.double()).square().sum().item() for name, grad in exact.items())
    return math.sqrt(wrong / sum(grad.double().square().sum().item() for grad in exact.values()))


def _loss(model: torch.nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=pair[0]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten(), ignore_index=IGNORE_INDEX)


def _gradient(drawn: Drawn, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    model = hf_model(drawn.resolved, weights=weights).to(dtype)
    _loss(model, drawn.batches()[0]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mixed_losses(drawn: Drawn, weights: Mapping[str, Tensor]) -> list[float]:
    optim = drawn.resolved.config.optim
    model = hf_model(drawn.resolved, weights=weights).to(torch.bfloat16)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    groups: dict[float, list[Tensor]] = {optim.weight_decay: [], 0.0: []}
    for master in masters.values():
        groups[optim.weight_decay if optim.decay_norms or master.dim() > 1 else 0.0].append(master)
    options = [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]
    optimizer = torch.optim.AdamW(options, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    losses = []
    for pair in drawn.batches():
        model.zero_grad()
        loss = _loss(model, pair)
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.values(), optim.clip or math.inf)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return losses
