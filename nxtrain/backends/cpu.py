"""CPU backend: gloo between processes, torch's fused kernels, an allocator that keeps freed pages."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.base import AdamStep, Rows, Support
from nxtrain.backends.c10d import C10dBackend
from nxtrain.backends.cpu_attention import blocked_attention, is_short
from nxtrain.backends.document_attention import attention_by_document
from nxtrain.backends.kernels import FusedKernels, row_tiles
from nxtrain.backends.rounding import RoundingKey, round_by_pairs_on_host

TILE_ENTRIES = 1 << 19
"""Entries of a tile: few enough to stay in the cache between operations, and enough to amortize a call."""


VECTOR_ENTRIES = 16
"""Entries of a cache line, a multiple of every vector length of torch's fused update."""


class CpuKernels(FusedKernels):
    """torch's fused kernels, with blocked attention for short sequences and updates tile by tile."""

    host_may_look = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocked_attention(q, k, v) if is_short(q) else super().attention(q, k, v)

    def document_attention(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().document_attention(q, k, v, starts)
        return attention_by_document(self.attention, q, k, v, starts)

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
        # torch's kernel rounds entries after the last full vector differently, so these entries are padded to a vector.
        flat = [x.view(-1) for x in entry]
        filled = [F.pad(x[-left_over:], (0, VECTOR_ENTRIES - left_over)) for x in flat]
        self._update(filled, how)
        for x, updated in zip(flat, filled, strict=True):
            x[-left_over:] = updated[:left_over]
        if len(flat[0]) > left_over:
            self._update([x[:-left_over] for x in flat], how)

    def _divisor(self, grad_scale: Tensor) -> Tensor | None:
        # The kernel writes scaled gradients back. The host can read the scale at no cost, and skip this for 1.
        return None if grad_scale.item() == 1 else super()._divisor(grad_scale)

    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        round_by_pairs_on_host(x, out, key, step)


class CpuBackend(C10dBackend):
    """Plain CPU tensors; one process per rank."""

    name = "cpu"
    compiler = "inductor"

    def __init__(self, *, hang_timeout_s: float = 1800.0) -> None:
        self._take_place()
        self.device = torch.device("cpu")
        self.kernels = self.host_kernels = CpuKernels()
        keep_heap()
        self._join("gloo", hang_timeout_s)

    @staticmethod
    def support() -> Support:
        return Support(True, "every machine has a CPU")

    def put(self, x: Tensor) -> Tensor:
        return x

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return torch.tensor(values, dtype=torch.float32).unbind()

    def peak_memory_bytes(self) -> int:
        # Not getrusage: on Linux its peak survives exec, so a child begins with the peak of its parent.
        status = Path("/proc/self/status")
        if not status.exists():
            return 0
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].removesuffix("kB")) * 1024


def keep_heap() -> None:
    """Make glibc keep freed blocks instead of returning them to the kernel.

    A training step frees and allocates the same large activations again and again. By default each becomes a fresh
    mapping, whose pages the kernel must clear. Without glibc this function does nothing.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
