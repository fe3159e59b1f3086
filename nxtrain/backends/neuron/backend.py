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
    """One logical NeuronCore per rank; several ranks are started by torchrun and form one world as `XlaBackend` says.

    Importing torch-xla on such a machine turns torchrun's variables into those of the Neuron plugin, one core and one
    process per rank, so the import must not come before they are there. NeuronX Distributed makes its groups from
    torch's default group, which must be of the backend `xla`, as it is where there are several ranks.

    Args:
        hang_timeout_s: Seconds that hosts wait for each other. A collective on the device has a limit of the runtime's
            own, which `nxtrain launch` sets from the same key.

    Source: torch_xla 2.9, torch_xla/__init__.py and torch_xla/_internal/neuron.py; src/neuronx_distributed/
    parallel_layers/parallel_state.py in https://github.com/aws-neuron/neuronx-distributed at v0.18.
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
