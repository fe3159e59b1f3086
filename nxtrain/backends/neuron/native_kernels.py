"""Kernels of TorchNeuron: elementary operations without 64-bit indices, some compiled into graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from nxtrain.backends.neuron.native_rounding import Rounder, round_by_views
from nxtrain.backends.torch_attention import sdpa
from nxtrain.backends.torch_kernels import PlainKernels, masked_cross_entropy, rms_norm
from nxtrain.common.kernels import RoundingKey
from nxtrain.common.vocab import VocabColumns

Function = TypeVar("Function", bound=Callable[..., object])


class NeuronNativeKernels(PlainKernels):
    """Kernels of one logical NeuronCore on TorchNeuron.

    Dispatching an operation costs the host tens of microseconds, and the update of each parameter has about twenty
    operations. So `compile.torch_compile` compiles the loss, the norms and the optimizer update, as well as the blocks.

    Attributes:
        compiles: `fuse` compiles functions.
        grouped: Attention takes grouped key/value heads, without copies per query head.
        bounded: The NKI Library's attention.
        rounder: Stochastic rounding in software; `rounds_on_host` is set if it is `round_on_host`.
        rounds: The hardware rounds casts stochastically.
    """

    static_shapes = True

    def __init__(self) -> None:
        super().__init__()
        self.compiles = False
        self.grouped = False
        self.rounds = False
        self.rounder: Rounder = round_by_views
        self._norm = rms_norm

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.grouped:
            return sdpa(q, k, v, grouped=True)
        return super().attention(q, k, v)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The final norm of the model is outside of the blocks' graphs.
        return self._norm(x, weight, eps)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        return masked_cross_entropy(logits, targets, columns, needs_grad=needs_grad, z_loss=z_loss)

    def compile(self) -> None:
        """Make `fuse` compile functions, and compile the RMS norm."""
        self.compiles = True
        self._norm = self.fuse(rms_norm)

    def fuse(self, function: Function, *, any_size: bool = False) -> Function:
        if not self.compiles:
            return function
        # Static shapes: TorchNeuron has no others. A graph break is an error, not a slow run.
        return torch.compile(function, backend="neuron", dynamic=False, fullgraph=True)  # type: ignore[return-value]

    def bits(self, x: Tensor) -> Tensor:
        try:
            return super().bits(x)
        except NotImplementedError:
            # torch raises this where a device has no kernel for a view of another type. Only the replica vote reads
            # bits, so the copy slows no training step.
            return x.detach().cpu().view(torch.int32).to(x.device)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        if self.rounds and not key.shared:
            out.copy_(x)
        else:
            self.rounder(x, out, key, step)
