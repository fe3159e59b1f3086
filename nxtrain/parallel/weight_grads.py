"""Postponed weight gradients of linear layers, for pipeline schedules that split the backward (zero bubble).

Other pipeline stages wait only for the gradients of inputs. So linear layers register functions that compute their
weight gradients, and the pipeline's schedule decides when these run.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nxtrain.parallel.linear import Product, SplitBackward

Postponed: TypeAlias = deque[tuple[nn.Parameter, Product]]
"""Weights and functions that compute their gradients, in the order of the backward pass."""


class WeightGradients:
    """Store of the postponed weight gradients of a model's linear layers.

    Args:
        model: A filled model; its linear layers are changed to postpone their weight gradients. The output projection
            is not changed, since its loss computes gradients in the forward pass. Embedding and norms have little to
            postpone, and frozen weights nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._postponed: Postponed = deque()
        for layer in model.modules():
            if isinstance(layer, SplitBackward) and layer.weight.requires_grad:
                layer.postpone = partial(self._add, layer.weight)

    def take(self) -> Postponed:
        """Return the weight gradients postponed since the last call, still to be computed, and clear the store."""
        taken, self._postponed = self._postponed, deque()
        return taken

    def _add(self, weight: nn.Parameter, product: Product) -> None:
        self._postponed.append((weight, product))


def compute(postponed: Postponed) -> None:
    """Compute postponed weight gradients one by one, freeing the inputs of each before the next.

    Autograd adds the gradients to the parameters and calls the parameters' hooks, as in any backward pass.
    """
    while postponed:
        _Gradient.apply(*postponed.popleft()).backward()


class _Gradient(torch.autograd.Function):
    """Autograd function of a scalar whose gradient with respect to the weight is the postponed weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, product: Product) -> Tensor:
        ctx.product = product
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.product(), None
