"""Gradients of weights that are computed later than those of what entered the layer.

Only the latter are what other pipeline stages wait for. So linear layers hand in how their weights' gradients are
computed, and the pipeline says when.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nxtrain.parallel.linear import Product, SplitBackward

Postponed: TypeAlias = deque[tuple[nn.Parameter, Product]]
"""Weights and what computes their gradients, in the order in which backward came by."""


class WeightGradients:
    """What the layers of a model postpone.

    Args:
        model: Filled. Its linear layers postpone from now on, but for the output projection, whose loss has its
            gradients from the forward pass; embedding and norms have little to postpone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._postponed: Postponed = deque()
        for layer in model.modules():
            if isinstance(layer, SplitBackward):
                layer.postpone = partial(self._add, layer.weight)

    def take(self) -> Postponed:
        """What was postponed since this was called last."""
        taken, self._postponed = self._postponed, deque()
        return taken

    def _add(self, weight: nn.Parameter, product: Product) -> None:
        self._postponed.append((weight, product))


def compute(postponed: Postponed) -> None:
    """Compute gradients, and let go of what each was computed from before the next.

    Autograd adds them to the parameters and calls the hooks of these, as at the end of any backward pass.
    """
    while postponed:
        _Gradient.apply(*postponed.popleft()).backward()


class _Gradient(torch.autograd.Function):
    """A number whose gradient is a given product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, product: Product) -> Tensor:
        ctx.product = product
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.product(), None
