"""Attention inside of documents on NVIDIA GPUs: FlexAttention against the formula, its memory, and its graphs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch._dynamo.utils import counters

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from tests.support.contract_kernels import exact_attention
from tests.support.contract_ranges import drawn_starts

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("params", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_flex_attention_is_chosen_and_computes_the_formula(backend: Backend, params: str, dtype: torch.dtype) -> None:
    backend.choose_attention("auto", AttentionShape(2, 1000, 4, 64, params, documents=True))
    assert backend.attention is not None and backend.attention.kind == "flex", backend.attention
    rng, bound = Random(1), {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for length in (1000, 2048):
        starts = backend.put(drawn_starts(rng, 2, length))
        q, grad = (torch.randn(length, 2, 4, 64, device=backend.device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(length, 2, 2, 64, device=backend.device, dtype=dtype) for _ in range(2))
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out = backend.kernels.document_attention(given[0], given[1], given[2], starts)
        wanted = exact_attention(exact[0], exact[1], exact[2], starts)
        ours = [out, *torch.autograd.grad(out, given, grad)]
        theirs = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
        for found, expected in zip(ours, theirs, strict=True):
            assert (found.double() - expected).norm() <= bound * expected.norm()


def test_other_documents_compile_nothing_and_read_nothing(backend: Backend) -> None:
    backend.choose_attention("auto", AttentionShape(1, 4096, 4, 64, "bf16", documents=True))
    rng = Random(2)
    rows = [backend.put(drawn_starts(rng, 1, 4096)) for _ in range(4)]
    q = torch.randn(4096, 1, 4, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    backend.kernels.document_attention(q, q, q, rows[0]).sum().backward()
    compiled = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for starts in rows[1:]:
            backend.kernels.document_attention(q, q, q, starts).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == compiled


def test_memory_is_linear_in_the_sequence(backend: Backend) -> None:
    peaks = []
    for length in (8192, 16384):
        backend.choose_attention("auto", AttentionShape(1, length, 2, 64, "bf16", documents=True))
        starts = backend.put(drawn_starts(Random(3), 1, length))
        q = torch.randn(length, 1, 2, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
        backend.kernels.document_attention(q, q, q, starts).sum().backward()
        torch.cuda.reset_peak_memory_stats(backend.device)
        before = torch.cuda.memory_allocated(backend.device)
        backend.kernels.document_attention(q, q, q, starts).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated(backend.device) - before)
    assert peaks[1] < 2.5 * peaks[0]
