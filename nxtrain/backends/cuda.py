"""CUDA backend: NCCL between processes, one GPU per rank, torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.backends.base import Backend, Rows, Support
from nxtrain.backends.c10d import C10dCollectives, Placement
from nxtrain.backends.cpu import CpuKernels
from nxtrain.backends.kernels import FusedKernels, row_tiles, sdpa
from nxtrain.errors import BackendError
from nxtrain.mesh import Mesh

PEAK_FLOPS = {
    "A100": 312e12,  # nvidia.com/en-us/data-center/a100, dense bfloat16
    "H100 PCIe": 756e12,  # nvidia.com/en-us/data-center/h100, half of the figure with sparsity
    "H100": 989e12,  # SXM, as above
    "H200": 989e12,  # nvidia.com/en-us/data-center/h200
}
"""By a part of the device's name; the first that fits counts."""


TILE_ENTRIES = 1 << 26
"""Entries updated by one call: enough for a GPU, and float32 copies of no more than these exist at once."""


class CudaKernels(FusedKernels):
    """torch's fused kernels."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, grouped=True)

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        calls: list[list[Rows]] = []
        room = 0
        for rows in row_tiles(shapes, TILE_ENTRIES):
            size = rows.number * math.prod(shapes[rows.name][1:])
            if size > room:
                calls.append([])
                room = TILE_ENTRIES
            calls[-1].append(rows)
            room -= size
        return calls


class CudaBackend(Backend):
    """One GPU per rank, chosen by the local rank."""

    name = "cuda"
    collectives: C10dCollectives

    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        support = self.support()
        if not support.ok:
            raise BackendError(f"backend.name=cuda cannot run here: {support.reason}")
        place = Placement.read()
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        gpus = torch.cuda.device_count()
        if self.local_rank >= gpus:
            raise BackendError(
                f"local rank {self.local_rank} has no GPU: this node shows {gpus}; start at most {gpus} ranks per node"
            )
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        self.kernels, self.host_kernels = CudaKernels(), CpuKernels()
        self.collectives = C10dCollectives(self.world)
        if self.world > 1:
            # Checkpoint plans are exchanged as host objects, which gloo carries without touching the GPU.
            timeout = timedelta(seconds=hang_timeout_s)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device, timeout=timeout)

    @staticmethod
    def support() -> Support:
        if torch.version.cuda is None:
            return Support(False, f"torch {torch.__version__} is built without CUDA")
        if not torch.cuda.is_available():
            return Support(False, "torch finds no usable NVIDIA GPU or driver (see nvidia-smi)")
        return Support(True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")

    def put(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        read = torch.stack([value.detach().to(self.device, torch.float32) for value in values.values()]).tolist()
        return dict(zip(values, read, strict=True))

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return self.put(torch.tensor(values, dtype=torch.float32)).unbind()

    def peak_flops(self) -> float | None:
        name = torch.cuda.get_device_name(self.device)
        return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        return self.collectives.device_mesh(self.device.type, mesh)

    def peak_memory_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
