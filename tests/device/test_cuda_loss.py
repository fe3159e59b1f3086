"""Loss on NVIDIA GPUs: products that are added to a sum in float32."""

from __future__ import annotations

import pytest
import torch

from nxtrain.backends.base import Backend

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_added_in_float32_without_memory_of_its_own(backend: Backend, dtype: torch.dtype) -> None:
    """A sum that held the rounded product would be off by 2^-9 of an entry, and would need the product's memory."""
    rows, inner, columns = 4096, 512, 1024
    a = torch.randn(inner, rows, device=backend.device, dtype=dtype).t()
    b = torch.randn(inner, columns, device=backend.device, dtype=dtype)
    total = torch.ones(rows, columns, device=backend.device)
    backend.kernels.add_product(total.clone(), a, b)  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats(backend.device)
    before = torch.cuda.memory_allocated(backend.device)
    backend.kernels.add_product(total, a, b)
    assert torch.cuda.max_memory_allocated(backend.device) - before < total.numel()
    wanted = 1 + a.double() @ b.double()
    assert (total.double() - wanted).norm() < 1e-5 * wanted.norm()
