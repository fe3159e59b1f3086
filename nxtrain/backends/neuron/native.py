"""TorchNeuron backend: Trainium as PyTorch's device "neuron", over `torch.distributed`; no NxD, and no PyTorch/XLA.

This backend has not run on hardware yet. It relies on AWS's documentation under torch/ of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest: about-pytorch-neuron, guides/torch-distributed,
compile/reference-torch-compile and guides/memory-profiling-guide, of Neuron SDK 2.33.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Support, fetched_names
from nxtrain.backends.c10d import AcceleratorBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.hardware import INSTANCES, chip_kind, this_machine
from nxtrain.backends.neuron.mesh_collectives import MeshCollectives
from nxtrain.backends.neuron.native_attention import SWITCH, choose_native
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.native_rounding import choose_rounder, hardware_rounds
from nxtrain.common.errors import BackendError
from nxtrain.common.process.greetings import without_greetings

DEVICE = "neuron"
"""Device without an index, as in AWS's guide: a process owns one logical core, chosen by its local rank."""

DEVICE_TYPE = "neuron"
"""Type of the device, for device meshes."""

PROCESS_GROUP = "neuron"
"""Process group for tensors of the device, by AWS's guide; host objects such as checkpoint plans use another."""


class NeuronNativeBackend(AcceleratorBackend):
    """One logical NeuronCore per rank.

    Stochastic rounding is done in software, by the key, as on CPU and CUDA; `nxtrain launch` disables the hardware's
    unless `backend.rounding=hardware`.
    """

    name = "neuron-native"
    compiler = "neuron"
    compiles_at_first_use = True
    kernels: NeuronNativeKernels

    def __init__(self, *, hang_timeout_s: float = 1800.0, torch_compile: bool = False) -> None:
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name={self.name} cannot run here: {support.reason}")
        self.extracts = torchneuron.compiles_only(os.environ)
        self._take_place()
        self.collectives = MeshCollectives(self.world, DEVICE_TYPE)
        # Before any tensor is on the device: joining assigns a core to this process.
        self._join(PROCESS_GROUP, hang_timeout_s)
        if self.world > 1:
            limit = timedelta(seconds=self.collectives.hang_timeout_s)
            with without_greetings():
                self.host_group = dist.new_group(backend="gloo", timeout=limit)
        self.device = torch.device(DEVICE)
        self.kernels, self.host_kernels = NeuronNativeKernels(), CpuKernels()
        self._rounding = ""

    @staticmethod
    def support() -> Support:
        found = torchneuron.support(devices=not torchneuron.compiles_only(os.environ))
        if found.ok and not hasattr(torch, DEVICE_TYPE):
            reason = (
                f"torch {torch.__version__} has no device {DEVICE_TYPE!r}, though TorchNeuron is installed; torch "
                "loads it unless TORCH_DEVICE_BACKEND_AUTOLOAD=0, so unset that"
            )
            return Support(False, f"{reason}\n    or {torchneuron.ELSEWHERE}")
        return found

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        return dict.fromkeys(fetched_names(values), 1.0) if self.extracts else super().fetch(values)

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        self.attention = choose_native(wanted, shape, switched_off=os.environ.get(SWITCH) == "0")
        self.kernels.grouped = self.attention.is_flash

    def choose_rounding(self, update: str, wanted: str) -> None:
        if update != "bf16_stochastic" or self.extracts:  # nothing can be probed; a later probe may choose otherwise
            return
        if wanted == "hardware":
            if not hardware_rounds(self.put):
                reason = "this device rounds casts to the nearest number, so backend.rounding=hardware has no effect"
                raise BackendError(f"{reason}; use backend.rounding=software, or start the run by nxtrain launch")
            self.kernels.rounds = True
            self._rounding = "stochastic rounding by the hardware, which nobody has tested with TorchNeuron"
            return
        rounder, self._rounding = choose_rounder(self.put)
        self.kernels.round_by(rounder)

    def compile_kernels(self) -> None:
        self.kernels.compile()

    def notes(self) -> tuple[str, ...]:
        blind = (
            ""
            if _find("get_fallback_ops")
            else ("this TorchNeuron has no get_fallback_ops, so operations that run on the host are not reported")
        )
        return tuple(filter(None, (*super().notes(), self._rounding, blind)))

    def fallbacks(self) -> tuple[str, ...]:
        found: Iterable[object] = _call("get_fallback_ops") or ()
        return tuple(sorted(map(str, found)))

    def forget_fallbacks(self) -> None:
        _call("clear_op_tracking")

    def num_compiled(self) -> int:
        # Dynamo counts the graphs that it hands to its compilers; operations outside of graphs are not counted.
        dynamo = sys.modules.get("torch._dynamo.utils")
        return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0

    def peak_flops(self) -> float | None:
        instance = this_machine()
        if instance is not None:
            return instance.device_flops
        kind = chip_kind(str(getattr(_call("get_device_properties"), "name", "")))
        return next((known.device_flops for known in INSTANCES.values() if known.target == kind), None)

    def profiler_options(self, profiles: Path) -> tuple[dict[str, Any], str]:
        from nxtrain.backends.neuron.native_profile import native_profiler  # torch's profiler takes time to import

        return native_profiler(profiles, os.environ)

    def finish_profiled(self) -> None:
        # The host runs ahead; a profile that ends before the device lacks the end of its work.
        _call("synchronize")

    def peak_memory_bytes(self) -> int:
        # The allocator counts finished work only, so the device must finish its queue first.
        _call("synchronize")
        return int(_call("max_memory_allocated") or 0)


def _call(name: str) -> Any:
    """Result of a function of TorchNeuron; None without one."""
    function = _find(name)
    return function() if function else None


def _find(name: str) -> Callable[[], Any] | None:
    """Function of `torch.neuron`, or of `torch_neuronx` where older releases have it; None without one."""
    found = _function(getattr(torch, DEVICE_TYPE, None), name)
    if found is not None:
        return found
    try:
        import torch_neuronx
    except ImportError:
        return None
    return _function(torch_neuronx, name)


def _function(module: object, name: str) -> Callable[[], Any] | None:
    found = getattr(module, name, None)
    return found if callable(found) else None
