"""CPU backend: gloo between processes, torch's fused kernels, an allocator that keeps its pages."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.backends.base import Backend, Support
from nxtrain.backends.c10d import C10dCollectives, Placement
from nxtrain.backends.cpu_attention import blocked_attention, is_short
from nxtrain.backends.kernels import FusedKernels
from nxtrain.mesh import Mesh


class CpuKernels(FusedKernels):
    """torch's fused kernels, but for attention over short sequences."""

    def __init__(self) -> None:
        super().__init__(one_by_one=True, grouped_attention=False)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocked_attention(q, k, v) if is_short(q) else super().attention(q, k, v)


class CpuBackend(Backend):
    """Plain CPU tensors; one process per rank."""

    name = "cpu"
    collectives: C10dCollectives

    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        place = Placement.read()
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.device = torch.device("cpu")
        self.kernels = CpuKernels()
        self.collectives = C10dCollectives(self.world)
        keep_heap()
        if self.world > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=hang_timeout_s))

    @staticmethod
    def support() -> Support:
        return Support(True, "every machine has a CPU")

    def put(self, x: Tensor) -> Tensor:
        return x

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return torch.tensor(values, dtype=torch.float32).unbind()

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        return self.collectives.device_mesh(self.device.type, mesh)

    def peak_memory_bytes(self) -> int:
        # Not getrusage: on Linux its peak survives exec, so a child begins with the peak of its parent.
        status = Path("/proc/self/status")
        if not status.exists():
            return 0
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].removesuffix("kB")) * 1024

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


def keep_heap() -> None:
    """Make glibc keep freed blocks instead of returning them to the kernel.

    A training step frees and allocates the same large activations again and again; by default each becomes a fresh
    mapping whose pages the kernel must clear. Elsewhere than on glibc this does nothing.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
