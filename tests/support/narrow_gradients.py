"""Gradients of single tensors in 16 bits, ours and those of transformers, next to float64.

All compute from weights that bfloat16 holds. Tokens go to all experts, and gates seldom reach their limit: at a switch
of a router, or at a kink, rounding decides the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import IGNORE_INDEX, true_targets
from nxtrain.config.check import Resolved
from tests.support.drawn import Drawn, draw, entropy_sum
from tests.support.drawn_fp16 import of_fp16
from tests.support.drawn_runs import first_weights
from tests.support.models import hf_model, hf_tensors
from tests.support.parity import gradient, local_pair, start, whole

FIRST_SCALE = 2.0**10
"""Loss scale at which no gradient of a draw overflows, or vanishes."""

LEAST = 0.05
"""Share of the whole gradient's norm below which a tensor's error counts as if its norm were this."""

Errors = dict[str, list[tuple[float, float]]]
"""Relative errors, ours and those of transformers, by the last names of a tensor."""


def resolved_of(run: Drawn, dtype: torch.dtype) -> Resolved:
    """Configuration of a draw in a type."""
    resolved = run.resolved
    mixture = resolved.dimensions.mixture
    changes: dict[str, Any] = {}
    if mixture is not None:
        changes["num_experts_per_tok"] = mixture.num_experts
        if mixture.limit is not None:
            changes["swiglu_limit"] = 7.0
    resolved = replace(resolved, model=resolved.model.model_copy(update=changes))
    return of_fp16(resolved, scale=FIRST_SCALE) if dtype == torch.float16 else resolved


def errors_of_tensors(backend: Backend, family: str, seed: int, indices: range, dtype: torch.dtype) -> Errors:
    """Errors of all tensors in draws of a family."""
    errors: Errors = defaultdict(list)
    for index in indices:
        run = draw("tensors", seed, index, family=family, bf16=dtype == torch.bfloat16)
        resolved = resolved_of(run, dtype)
        weights = {name: weight.bfloat16().float() for name, weight in first_weights(run).items()}
        batch = run.batches()[0]
        exact, theirs = (gradients_of_torch(resolved, weights, batch, of) for of in (torch.float64, dtype))
        ours = gradients_of_ours(backend, resolved, weights, batch)
        assert ours.keys() == exact.keys()
        least = LEAST * torch.stack([grad.square().sum() for grad in exact.values()]).sum().sqrt()
        for name, wanted in exact.items():
            norm = torch.maximum(wanted.norm(), least)
            kind = ".".join(part for part in name.split(".")[-3:] if not part.isdigit())
            distances = [float((grads[name] - wanted).norm() / norm) for grads in (ours, theirs)]
            errors[kind].append((distances[0], distances[1]))
    return errors


def gradients_of_ours(
    backend: Backend, resolved: Resolved, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Our gradients of a batch, unscaled, in float64."""
    state = start(backend, resolved, weights)
    shards = gradient(state, local_pair(state, batch, resolved.config.train.micro_batch)).shards
    scale = 1.0 if state.loss_scale is None else float(state.loss_scale.per_position())
    return {name: grad.double() / scale for name, grad in whole([shards], resolved).items()}


def gradients_of_torch(
    resolved: Resolved, weights: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """transformers' gradients of a batch in a type, summed over its micro-batches in float64."""
    model = hf_model(resolved, weights=weights).to(dtype)
    mixture, config = resolved.dimensions.mixture, resolved.config
    inputs, targets = batch
    counted = true_targets(targets) != IGNORE_INDEX
    sums: dict[str, Tensor] = {}
    for own in torch.arange(len(inputs)).split(config.train.micro_batch):
        model.zero_grad()
        given = {} if mixture is None else {"output_router_logits": True}
        result = model(input_ids=inputs[own], **given)
        loss = entropy_sum(result.logits.double(), targets[own])
        if mixture is not None:
            squares = torch.cat(result.router_logits).double().logsumexp(-1).square().mean()
            others = mixture.aux_loss_coef * result.aux_loss + config.model.moe_z_loss * squares
            loss = loss + others * counted[own].sum()
        (loss / counted.sum()).backward()
        grads = [(name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in model.named_parameters()]
        for name, grad in hf_tensors(resolved.dimensions, grads).items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + grad.double()
    return sums
