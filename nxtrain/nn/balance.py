"""Auxiliary losses of mixture-of-experts routers: the load balancing loss over all experts, and the z-loss of logits.

Routing statistics are sums over tokens and layers, (2E + 4,) float32, as `nxtrain.nn.mixture.Router` returns them. Both
losses are functions of the sums over all ranks that have tokens of the same micro-step.

Source: Fedus et al. 2021 (arXiv:2101.03961) section 2.2; `load_balancing_loss_func` of transformers' Mixtral; Zoph et
al. 2022 (arXiv:2202.08906) equation 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.layers import RouterLosses
from nxtrain.common.mesh import Axis
from nxtrain.common.vocab import IGNORE_INDEX, true_targets
from nxtrain.parallel.regions import sum_over


def balance_loss(routing: Tensor) -> tuple[Tensor, Tensor]:
    """Load balancing loss and z-loss of routing statistics, () each.

    The load balancing loss is E * sum(f * P): f is the mean number of slots of each expert for a token, P the mean
    probability of each expert. f has no gradient.
    """
    num_experts = (routing.shape[0] - 4) // 2
    slots, probabilities = routing[: 2 * num_experts].unflatten(0, (2, -1)).unbind()
    squares, tokens = routing[2 * num_experts : -2].unbind()
    tokens = tokens.clamp(min=1)  # a micro-step may have padding alone
    load, mean = slots / tokens, probabilities / tokens
    return num_experts * (load * mean).sum(), squares / tokens


class _WithGradientOf(torch.autograd.Function):
    """Autograd function that returns a loss unchanged, and adds the gradient of a second loss in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


@dataclass(frozen=True)
class BatchRouterLosses(RouterLosses):
    """Router losses of a micro-batch whose tokens are divided over ranks.

    The statistics are summed over ranks first, since the mean of the ranks' losses would be a different function.

    Args:
        aux_coef, z_coef: Coefficients of the load balancing loss and of the z-loss.
        comm: Collectives.
        axis: Axis of the ranks that have different tokens.
        num_same: Number of ranks of the axis that have the same targets.
    """

    aux_coef: float
    z_coef: float
    comm: Collectives
    axis: Axis
    num_same: int = 1

    def add_to(
        self, loss: Tensor, routing: Tensor, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return loss, None
        counted = (true_targets(targets) != IGNORE_INDEX).sum(dtype=torch.float32).unsqueeze(0)
        sums = sum_over(torch.cat([routing, counted]), self.comm, self.axis)
        losses = torch.stack(balance_loss(sums[:-1]))
        num_targets = sums[-1].detach() / self.num_same
        # This rank's part of a sum over the ranks of dp x cp.
        measured = losses.detach() * num_targets / (self.axis.size // self.num_same)
        if not (self.aux_coef or self.z_coef):
            return loss, measured
        # The update divides by the tokens of the global batch. So the factor makes a mean over them.
        other = (self.aux_coef * losses[0] + self.z_coef * losses[1]) * num_targets
        if scale is not None:
            other = other * scale
        added: Tensor = _WithGradientOf.apply(loss, other)
        return added, measured
