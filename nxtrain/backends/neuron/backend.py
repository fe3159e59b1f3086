"""Neuron backend: PyTorch/XLA on AWS's Trainium, with the hardware's stochastic rounding."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import DEFAULTS, BackendSettings, Support, fetched_names
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.backends.expert_choice import ExpertShape
from nxtrain.backends.neuron import blockwise, bounded, sdk
from nxtrain.backends.neuron.attention import choose
from nxtrain.backends.neuron.bounded import BoundedKernels
from nxtrain.backends.neuron.experts import choose_experts
from nxtrain.backends.neuron.flash import FlashFunction, flash_attention, load
from nxtrain.backends.neuron.hardware import this_machine
from nxtrain.backends.xla.backend import XlaBackend, XlaDiagnostics, XlaKernels
from nxtrain.backends.xla.environment import extracting, refuse_dead_variables
from nxtrain.common.kernels import RoundingKey


class NeuronKernels(XlaKernels):
    """Kernels of Trainium on PyTorch/XLA: NKI attention, and stochastic rounding by the hardware.

    The hardware's random number generator has one stream per core. AWS does not document that two cores draw equal
    bits, and two programs draw different numbers of bits. So the hardware rounds only entries that no other rank of the
    same replica also rounds:

    - Replicas over tp and over pp (`Layout.is_shared`) are rounded in software, with equal keys. Their gradients are
      one float32 sum. Software rounding of these few tensors takes no memory, no collective and no further graph.
      The alternative, one owner that sends its result, would take a collective of a whole embedding per step.
    - With `parallel.shard=zero1` one rank rounds each entry and the data parallel ranks gather the result.
    - With `parallel.shard=none` data parallel replicas rely on equal streams. Every rank of a stage starts with one
      seed (`NEURON_RT_STOCHASTIC_ROUNDING_SEED`), runs the same graphs in the same order, and draws equally many bits
      for any data. The replica check (`recovery.vote_every`) verifies this.

    Args:
        rounds: The device rounds every cast from float32 stochastically (`NEURON_RT_STOCHASTIC_ROUNDING_EN=1`). The
            random bits come from the hardware's generator, not from the key. So they differ from other backends, and a
            resumed run draws other bits than an uninterrupted run.
        flash: NKI's flash attention function; None to use elementary operations.
        bounded: NKI's attention for documents and windows; None to use elementary operations.
        lnc: Physical cores that share a kernel.

    Source: about-neuron/arch/neuron-features/rounding-modes.rst in https://github.com/aws-neuron/aws-neuron-sdk.
    """

    def __init__(
        self,
        *,
        rounds: bool,
        flash: FlashFunction | None = None,
        bounded: BoundedKernels | None = None,
        lnc: int = 1,
    ) -> None:
        super().__init__()
        self.rounds, self.lnc = rounds, lnc
        self.flash, self.bounded = flash, bounded

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash is None:
            return super().attention(q, k, v)
        return flash_attention(self.flash, self.lnc, q, k, v)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        if self.rounds and not key.shared:
            out.copy_(x)
        else:
            super().stochastic_round(x, out, key, step)


class NeuronDiagnostics(XlaDiagnostics):
    """Measurements of a Trainium core: the counters of torch-xla, and the peak FLOP/s of the instance."""

    def peak_flops(self, params: str = "bf16") -> float | None:
        instance = this_machine()
        if instance is None:
            return None
        return instance.device_flops


class NeuronBackend(XlaBackend):
    """Trainium backend on PyTorch/XLA, with one logical NeuronCore per rank; torchrun starts the ranks.

    On a Trainium instance, the import of torch-xla translates torchrun's environment variables into those of the Neuron
    plugin, with one core and one process per rank. So torch-xla must be imported after the variables are set. NeuronX
    Distributed makes its process groups from torch's default group, which has the backend `xla`.

    Args:
        settings: `hang_timeout_s` limits the waits of hosts for each other. Collectives on the device have a time limit
            of the Neuron runtime, which `nxtrain launch` sets from the same key.
        sync, meet: See `XlaBackend`; for tests with several devices in one process.

    Source: torch_xla 2.9, torch_xla/__init__.py and torch_xla/_internal/neuron.py; src/neuronx_distributed/
    parallel_layers/parallel_state.py in https://github.com/aws-neuron/neuronx-distributed at v0.18.
    """

    name = "neuron"
    diagnostics: Diagnostics = NeuronDiagnostics()
    allow_unverified = False

    def __init__(
        self,
        settings: BackendSettings = DEFAULTS,
        *,
        sync: Callable[[], None] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        refuse_dead_variables(os.environ, sdk.detect())
        super().__init__(settings, sync=sync, meet=meet)
        self.allow_unverified = settings.allow_unverified
        self.extracts = extracting(os.environ)
        self._rounds = os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") == "1"
        self.kernels = NeuronKernels(rounds=self._rounds)

    @staticmethod
    def support() -> Support:
        return sdk.support()

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        if not self.extracts:
            return super().fetch(values)
        self.step_boundary()
        return dict.fromkeys(fetched_names(values), 1.0)

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        choice = choose(
            wanted,
            shape,
            this_machine(),
            sdk.detect(),
            sdk.installed("neuronx-distributed"),
            allow_unverified=self.allow_unverified,
        )
        flash = load() if choice.is_flash else None
        of_ranges = bounded.load(choice.lnc) if choice.kind == "bounded" else None
        self.kernels = NeuronKernels(rounds=self._rounds, flash=flash, bounded=of_ranges, lnc=choice.lnc)
        self.attention = choice

    def choose_experts(self, wanted: str, shape: ExpertShape | None) -> None:
        if shape is None:
            return
        choice = choose_experts(wanted, shape, this_machine(), sdk.detect())
        if choice.kind == "blockwise":
            self.kernels.blockwise = blockwise.load()
        self.experts = str(choice)

    def notes(self) -> tuple[str, ...]:
        is_flash = self.attention is not None and self.attention.is_flash
        return (*super().notes(), *(sdk.unverified_notes() if is_flash else ()))
