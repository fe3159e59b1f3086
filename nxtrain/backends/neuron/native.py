"""TorchNeuron backend: Trainium as PyTorch's device "neuron" with `torch.distributed`, without NxD and PyTorch/XLA.

This backend has not run on hardware yet. It relies on AWS's documentation under torch/ of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest: about-pytorch-neuron, guides/torch-distributed,
compile/reference-torch-compile and guides/memory-profiling-guide, of Neuron SDK 2.33.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionKind, AttentionShape, layout_of_ring
from nxtrain.backends.base import DEFAULTS, BackendSettings, Support, fetched_names
from nxtrain.backends.c10d import AcceleratorBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.backends.neuron import native_library as library
from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.hardware import this_machine
from nxtrain.backends.neuron.mesh_collectives import MeshCollectives
from nxtrain.backends.neuron.native_attention import SWITCH, choose_native, library_lacking
from nxtrain.backends.neuron.native_diagnostics import DEVICE_TYPE, NeuronNativeDiagnostics, find_function
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.native_rounding import choose_rounder, hardware_rounds, round_on_host
from nxtrain.backends.sdpa_kernels import first_line
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.greetings import suppress_gloo_messages

DEVICE = "neuron"
"""Name of torch's device. It has no index: a process owns one logical core, chosen by its local rank."""

PROCESS_GROUP = "neuron"
"""Name of the `torch.distributed` backend for device tensors; host objects such as checkpoint plans use gloo."""


class NeuronNativeBackend(AcceleratorBackend):
    """TorchNeuron backend with one logical NeuronCore per rank.

    Stochastic rounding runs in software with the run's keys, as on CPU and CUDA. `nxtrain launch` disables the
    hardware's stochastic rounding unless `backend.rounding=hardware`.
    """

    name = "neuron-native"
    compiler = "neuron"
    compiles_at_first_use = True
    has_rings = True
    kernels: NeuronNativeKernels
    _mesh = Mesh(1, 0)
    diagnostics: Diagnostics = NeuronNativeDiagnostics()

    def __init__(self, settings: BackendSettings = DEFAULTS) -> None:
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name={self.name} cannot run here: {support.reason}")
        self.extracts = torchneuron.compiles_only(os.environ)
        self._read_placement()
        self.collectives = MeshCollectives(self.world, DEVICE_TYPE)
        # Before any tensor is on the device, since joining the process group assigns a core to this process.
        self._join(PROCESS_GROUP, settings.hang_timeout_s)
        if self.world > 1:
            limit = timedelta(seconds=self.collectives.hang_timeout_s)
            with suppress_gloo_messages():
                self.host_group = dist.new_group(backend="gloo", timeout=limit)
        self.device = torch.device(DEVICE)
        self.kernels, self.host_kernels = NeuronNativeKernels(), CpuKernels()
        self._rounding = ""

    @staticmethod
    def support() -> Support:
        supported = torchneuron.support(devices=not torchneuron.compiles_only(os.environ))
        if supported.ok and not hasattr(torch, DEVICE_TYPE):
            reason = (
                f"torch {torch.__version__} has no device {DEVICE_TYPE!r}, though TorchNeuron is installed; torch "
                "loads it unless TORCH_DEVICE_BACKEND_AUTOLOAD=0, so unset that"
            )
            return Support(False, f"{reason}\n    or {torchneuron.ELSEWHERE}")
        return supported

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        return dict.fromkeys(fetched_names(values), 1.0) if self.extracts else super().fetch(values)

    def lay_out(self, mesh: Mesh) -> None:
        super().lay_out(mesh)
        self._mesh = mesh

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        machine = this_machine()
        lnc = 1 if machine is None else machine.physical_cores
        choose = partial(choose_native, wanted, switched_off=os.environ.get(SWITCH) == "0", lnc=lnc)
        lacking = library_lacking()
        choice = choose(shape, library=lacking)
        kinds = {choice.kind}
        if shape.is_mixed:
            kinds.add(choose(replace(shape, window=None, full_layers=0), library=lacking).kind)
        why = self._take_library(kinds, shape, lnc)
        if why and wanted == "flash":
            raise BackendError(f"backend.attention=flash cannot run on this device: {why}; use auto")
        self.attention = choose(shape, library=why) if why else choice
        self.kernels.grouped = self.attention.is_flash

    def _take_library(self, kinds: Container[AttentionKind], shape: AttentionShape, lnc: int) -> str:
        """Load the NKI Library's attention kernels of these kinds; return the reason if kernels are missing or fail."""
        self.kernels.bounded = self.ring = None
        why = ""
        try:
            if "ring" in kinds:  # all ranks load these together
                is_striped = layout_of_ring(shape.cp_layout) == "striped"
                self.ring = library.load_ring(self._mesh.cp, lnc, is_striped=is_striped)
            if "bounded" in kinds:
                kernels = library.load_bounded(lnc)
                if not self.extracts:
                    why = library.bounded_failure(kernels, self.device, shape.head_size)
                if not why:
                    self.kernels.bounded = kernels
        except ImportError as error:
            why = first_line(error)
        return why

    def choose_rounding(self, update: str, wanted: str) -> None:
        if update != "bf16_stochastic" or self.extracts:  # nothing can be probed; a later probe may choose otherwise
            return
        if wanted == "hardware":
            if not hardware_rounds(self.put):
                reason = "backend.rounding=hardware has no effect, since this device rounds casts to the nearest number"
                raise BackendError(f"{reason}; use backend.rounding=software, or start the run by nxtrain launch")
            self.kernels.rounds = True
            self._rounding = "stochastic rounding by the hardware, which nobody has tested with TorchNeuron"
            return
        self.kernels.rounder, self._rounding = choose_rounder(self.put)
        self.kernels.rounds_on_host = self.kernels.rounder is round_on_host

    def compile_kernels(self) -> None:
        self.kernels.compile()

    def notes(self) -> tuple[str, ...]:
        lines = list(super().notes())
        if self._rounding:
            lines.append(self._rounding)
        if find_function("get_fallback_ops") is None:
            lines.append(
                "this TorchNeuron has no get_fallback_ops, so operations that run on the host are not reported"
            )
        return tuple(lines)
