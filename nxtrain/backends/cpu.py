"""CPU backend: gloo between processes, torch's fused kernels, an allocator that keeps its pages."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.backends.base import AdamStep, Backend, Rows, Support
from nxtrain.backends.c10d import C10dCollectives, Placement
from nxtrain.backends.cpu_attention import blocked_attention, is_short
from nxtrain.backends.kernels import FusedKernels, row_tiles
from nxtrain.backends.rounding import RoundingKey, round_by_pairs_on_host
from nxtrain.mesh import Mesh

TILE_ENTRIES = 1 << 19
"""Few enough that what one operation of an update writes is in the cache for the next, and many enough for its call."""


VECTOR_ENTRIES = 16
"""Entries of a cache line, which torch's fused update takes at a time; a multiple of every vector's length."""


class CpuKernels(FusedKernels):
    """torch's fused kernels, but for attention over short sequences; updates tile by tile."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocked_attention(q, k, v) if is_short(q) else super().attention(q, k, v)

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        return [[rows] for rows in row_tiles(shapes, TILE_ENTRIES)]

    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        for entry in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            self._update(entry, how)

    def _update(self, entry: Sequence[Tensor], how: AdamStep) -> None:
        if not (left_over := entry[0].numel() % VECTOR_ENTRIES):
            param, grad, exp_avg, exp_avg_sq = entry
            super().adamw([param], [grad], [exp_avg], [exp_avg_sq], how)
            return
        # What its vector instructions leave over torch's kernel rounds differently, so those entries are filled up.
        flat = [x.view(-1) for x in entry]
        filled = [F.pad(x[-left_over:], (0, VECTOR_ENTRIES - left_over)) for x in flat]
        self._update(filled, how)
        for x, updated in zip(flat, filled, strict=True):
            x[-left_over:] = updated[:left_over]
        if len(flat[0]) > left_over:
            self._update([x[:-left_over] for x in flat], how)

    def _divisor(self, grad_scale: Tensor) -> Tensor | None:
        # The kernel writes gradients back that it scales, which it can be spared here, where the host may look.
        return None if grad_scale.item() == 1 else super()._divisor(grad_scale)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_by_pairs_on_host(x, out, key, step)


class CpuBackend(Backend):
    """Plain CPU tensors; one process per rank."""

    name = "cpu"
    collectives: C10dCollectives

    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        place = Placement.read()
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.device = torch.device("cpu")
        self.kernels = self.host_kernels = CpuKernels()
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
