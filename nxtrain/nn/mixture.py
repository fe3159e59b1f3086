"""Mixture-of-experts layer, in which a router selects k expert feed-forwards for each token.

Shapes: S sequence, B batch, D hidden, E experts, k experts of a token; S/tp is S without sequence parallelism.

Source: Shazeer et al. 2017 (arXiv:1701.06538); Jiang et al. 2024 (arXiv:2401.04088) section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.sharding import Init, ShardSpec

if TYPE_CHECKING:
    from nxtrain.common.family import BuildContext


class Router(nn.Module):
    """Top-k router of a mixture-of-experts layer, computed in float32.

    Of equally probable experts, the router selects the expert with the lower index, on every device.

    Args:
        hidden_size: Hidden size D.
        mixture: Number of experts.
        init: Initial values of the weight.
        context: Layers and kernels of the model.
    """

    def __init__(self, hidden_size: int, mixture: MoeShape, *, init: Init, context: BuildContext) -> None:
        super().__init__()
        shape = (mixture.num_experts, hidden_size)
        self.specs = {"weight": ShardSpec(shape, partial_gradient=context.layers.sequence_parallel, init=init)}
        self.weight = nn.Parameter(torch.empty(shape, dtype=context.dtype))
        self.bias: nn.Parameter | None = None
        if mixture.biases:
            self.specs["bias"] = replace(self.specs["weight"], shape=shape[:1], segments=(), decay=False)
            self.bias = nn.Parameter(torch.empty(shape[:1], dtype=context.dtype))
        self._mixture, self._kernels = mixture, context.kernels

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens (S/tp, B, D) to experts: weights (S/tp, B, k) float32, expert indices, and routing statistics.

        The statistics are (2E + 4,) float32, sums over tokens. They are slots of each expert, probabilities of each
        expert, squared log-sum-exp of the logits, tokens, entropies of the probabilities, and dropped slots, here 0.
        Slots and entropies have no gradient.

        Args:
            x: Activations.
            counted: (S/tp, B) float32, 1 for a token that counts in the statistics and 0 otherwise; None if all count.
        """
        mixture = self._mixture
        logits = self._kernels.linear(x.float(), self.weight.float())
        if self.bias is not None:
            logits = logits + self.bias.float()
        probabilities = logits.softmax(dim=-1)
        order = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
        indices = order[..., : mixture.experts_per_token].contiguous()
        weights = probabilities.gather(-1, indices)
        if mixture.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, indices, _statistics(logits.flatten(0, 1), probabilities.flatten(0, 1), indices, counted)


def _statistics(logits: Tensor, probabilities: Tensor, indices: Tensor, counted: Tensor | None) -> Tensor:
    """Routing statistics of a layer, (2E + 4,).

    The inputs are (T, E) twice, (S/tp, B, k), and (S/tp, B), where T = S/tp * B.
    """
    num_tokens, num_experts = logits.shape
    numbers = torch.arange(num_experts, device=logits.device)
    hits = indices.flatten().unsqueeze(1) == numbers
    scales = logits.logsumexp(dim=-1)
    squares, entropies = scales.square(), scales - (probabilities * logits).sum(-1)
    if counted is None:
        slots, means = hits.sum(0, dtype=torch.float32), probabilities.sum(0)
        tokens = logits.new_full((), num_tokens)
    else:
        of_tokens = counted.flatten()
        slots = of_tokens @ hits.unflatten(0, (num_tokens, -1)).sum(1, dtype=torch.float32)
        means, tokens = of_tokens @ probabilities, of_tokens.sum()
        squares, entropies = squares * of_tokens, entropies * of_tokens
    sums = torch.stack([squares.sum(), tokens, entropies.sum().detach(), torch.zeros_like(tokens)])
    return torch.cat([slots, means, sums])


def load_of(routing: Tensor) -> Tensor:
    """Expert loads of a layer, (E + 3,) float32 without gradient: slots by expert, tokens, entropies, dropped slots."""
    num_experts = (routing.shape[0] - 4) // 2
    return torch.cat([routing[:num_experts], routing[-3:]]).detach()


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts feed-forward: the weighted sum of the experts that the router selects.

    Args:
        hidden_size: Hidden size D.
        mixture: Number and width of the experts.
        init, init_out: Initial values of the input and output projections; the router is initialized like the input
            projections.
        context: Layers and kernels of the model.
    """

    def __init__(
        self, hidden_size: int, mixture: MoeShape, *, init: Init, init_out: Init, context: BuildContext
    ) -> None:
        super().__init__()
        self.add_module(mixture.router, Router(hidden_size, mixture, init=init, context=context))
        self._router = mixture.router
        self.experts = context.layers.experts(
            hidden_size, mixture, init, init_out, capacity_factor=context.moe_capacity_factor
        )

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Apply the layer: (S/tp, B, D) to (S/tp, B, D), and the routing statistics with the number of dropped slots.

        `counted` is as for `Router.forward`.
        """
        weights, indices, routing = getattr(self, self._router)(x, counted)
        out, num_dropped = self.experts(x, weights, indices)
        if num_dropped is not None:
            routing = torch.cat([routing[:-1], num_dropped.unsqueeze(0)])
        return out, routing
