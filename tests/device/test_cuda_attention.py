"""Attention on NVIDIA GPUs: no scores in memory, whatever the type."""

from __future__ import annotations

import pytest
import torch

from nxtrain.backends.base import Backend

pytestmark = pytest.mark.cuda

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
def test_memory_is_linear_in_the_sequence(backend: Backend, dtype: torch.dtype) -> None:
    """Scores of 8,192 tokens would take 256 MiB a head at least."""
    peaks = []
    for length in (4096, 8192):
        q, kv = (
            torch.randn(length, 1, heads, 64, device=backend.device, dtype=dtype, requires_grad=True)
            for heads in (4, 2)
        )
        torch.cuda.reset_peak_memory_stats(backend.device)
        before = torch.cuda.memory_allocated(backend.device)
        backend.kernels.attention(q, kv, kv).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated(backend.device) - before)
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < 8192**2 * 4 * dtype.itemsize / 2
