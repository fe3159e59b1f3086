"""TorchNeuron backend: Trainium as PyTorch's device "neuron", over `torch.distributed`; no NxD, and no PyTorch/XLA.

This backend has not run on hardware yet. It relies on AWS's documentation under torch/ of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest: about-pytorch-neuron, guides/torch-distributed,
compile/reference-torch-compile and guides/memory-profiling-guide, of Neuron SDK 2.33.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from nxtrain.backends.base import Support
from nxtrain.backends.c10d import AcceleratorBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.kernels import PlainKernels
from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.hardware import this_machine
from nxtrain.errors import BackendError
from nxtrain.process.greetings import without_greetings

DEVICE = "neuron"
"""Device without an index, as in AWS's guide: a process owns one logical core, chosen by its local rank."""

PROCESS_GROUP = "neuron"
"""Process group for tensors of the device, by AWS's guide; host objects such as checkpoint plans use another."""


class NeuronNativeBackend(AcceleratorBackend):
    """One logical NeuronCore per rank.

    Stochastic rounding is done in software, by the key, as on CPU and CUDA; `nxtrain launch` disables the hardware's.
    """

    name = "neuron-native"
    compiler = "neuron"
    compiles_at_first_use = True

    def __init__(self, *, hang_timeout_s: float = 1800.0, torch_compile: bool = False) -> None:
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name={self.name} cannot run here: {support.reason}")
        self._take_place()
        # Before any tensor is on the device: joining assigns a core to this process.
        self._join(PROCESS_GROUP, hang_timeout_s)
        if self.world > 1:
            with without_greetings():
                limit = timedelta(seconds=self.collectives.hang_timeout_s)
                self.host_group = dist.new_group(backend="gloo", timeout=limit)
        self.device = torch.device(DEVICE)
        self.kernels, self.host_kernels = PlainKernels(), CpuKernels()

    @staticmethod
    def support() -> Support:
        found = torchneuron.support()
        if found.ok and not hasattr(torch, DEVICE):
            reason = (
                f"torch {torch.__version__} has no device {DEVICE!r}, though TorchNeuron is installed; torch loads it "
                "unless TORCH_DEVICE_BACKEND_AUTOLOAD=0, so unset that"
            )
            return Support(False, f"{reason}\n    or {torchneuron.ELSEWHERE}")
        return found

    def peak_flops(self) -> float | None:
        instance = this_machine()
        return instance.core_flops if instance else None

    def peak_memory_bytes(self) -> int:
        # The allocator counts finished work only, so the device must finish its queue first.
        torch.accelerator.synchronize()
        return int(torch.accelerator.max_memory_allocated())
