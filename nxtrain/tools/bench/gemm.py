"""Fastest matrix product of a machine, the bound of every training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nxtrain.backends.cpu_products import has_products
from nxtrain.tools.bench.clocks import Clocks

ON_HOST = ((2048, 512, 512), (2048, 512, 2816), (2048, 2048, 2048))
ON_ACCELERATOR = ((8192, 8192, 8192), (8192, 4096, 14336))
"""Rows, inner size and columns; the fastest counts."""

REPEATS = 10


def peak(clocks: Clocks, dtype: torch.dtype, *, on_host: bool) -> Callable[[], dict[str, float]]:
    """A turn that measures FLOPs per second by each clock, each the best of several products.

    Args:
        clocks: The device.
        dtype: Type of the matrices; on a CPU without instructions for this type, float32 is the faster one.
        on_host: The device is a CPU.
    """
    device = clocks.device
    shapes = ON_HOST if on_host else ON_ACCELERATOR
    if on_host and not has_products(dtype):
        dtype = torch.float32
    pairs = [
        (torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device))
        for m, k, n in shapes
    ]

    def product(left: Tensor, right: Tensor) -> Tensor:
        out = torch.nn.functional.linear(left, right)
        clocks.read(out[0, 0])
        return out  # a lazy device computes only what still exists

    def turn() -> dict[str, float]:
        best: dict[str, float] = {}
        for left, right in pairs:
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[0]
            for _ in range(REPEATS):
                with clocks.measure() as seconds:
                    product(left, right)
                for clock, elapsed in seconds.items():
                    best[clock] = max(best.get(clock, 0.0), flops / elapsed)
        return best

    return turn
