"""Neuron backend: PyTorch/XLA on AWS's Trainium, whose hardware can round at random."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.hardware import this_machine
from nxtrain.backends.rounding import RoundingKey
from nxtrain.backends.shell import extracting, refuse_dead_variables
from nxtrain.backends.xla import XlaBackend, XlaKernels


class NeuronKernels(XlaKernels):
    """Kernels of a device that rounds every cast from float32 at random (`NEURON_RT_STOCHASTIC_ROUNDING_EN=1`).

    The bits come from the hardware's generator instead of the key: other bits than on other backends, and not those
    of the step after a resume.

    Source: about-neuron/arch/neuron-features/rounding-modes.rst in https://github.com/aws-neuron/aws-neuron-sdk.
    """

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        out.copy_(x)


class NeuronBackend(XlaBackend):
    """One logical NeuronCore per rank.

    Args:
        hang_timeout_s: Unused: the runtime has a limit of its own, which `nxtrain launch` sets from the same key.
    """

    name = "neuron"

    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        refuse_dead_variables(os.environ, sdk.detect())
        super().__init__(hang_timeout_s=hang_timeout_s)
        self.extracts = extracting(os.environ)
        if os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") == "1":
            self.kernels = NeuronKernels()

    @staticmethod
    def support() -> Support:
        return sdk.support()

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        if not self.extracts:
            return super().fetch(values)
        self.step_boundary()
        return dict.fromkeys(values, 1.0)

    def peak_flops(self) -> float | None:
        instance = this_machine()
        return instance.core_flops if instance else None
