"""Attention inside of documents and between ranks on NVIDIA GPUs, against the formula; its memory and its graphs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch._dynamo.utils import counters

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.common.kernels import KeyRanges
from nxtrain.common.sequence_cut import CutLayout, SequenceCut
from tests.support.contract_kernels import exact_attention
from tests.support.contract_ranges import drawn_starts, exact_ranged

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    ("wanted", "kind", "dtype"),
    [("auto", "flex", torch.float32), ("flex", "flex", torch.bfloat16), ("auto", "flash", torch.bfloat16)],
)
def test_the_chosen_kernel_computes_the_formula(backend: Backend, wanted: str, kind: str, dtype: torch.dtype) -> None:
    params = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    backend.choose_attention(wanted, AttentionShape(2, 1000, 4, 64, params, documents=True))
    assert backend.attention is not None and backend.attention.kind == kind, backend.attention
    rng, bound = Random(1), {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for length in (1000, 2048):
        starts = backend.put(drawn_starts(rng, 2, length))
        q, grad = (torch.randn(length, 2, 4, 64, device=backend.device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(length, 2, 2, 64, device=backend.device, dtype=dtype) for _ in range(2))
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out = backend.kernels.document_attention(given[0], given[1], given[2], starts)
        formula = exact_attention(exact[0], exact[1], exact[2], starts)
        ours = [out, *torch.autograd.grad(out, given, grad)]
        theirs = [formula, *torch.autograd.grad(formula, exact, grad.double())]
        for actual, expected in zip(ours, theirs, strict=True):
            assert (actual.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_of_a_rank_compute_the_formula(backend: Backend, layout: CutLayout, window: int | None) -> None:
    """Queries of a rank and keys of another, of which some queries see none, with the sums of these keys."""
    backend.choose_attention("auto", AttentionShape(2, 2048, 4, 64, "bf16", documents=True, cp=4, window=window))
    assert backend.attention is not None and backend.attention.kind == "flash", backend.attention
    cut, rng = SequenceCut(2048, 4, layout), Random(4)
    for source in range(4):
        own, theirs = (torch.tensor(cut.listed(rank), device=backend.device) for rank in (1, source))
        starts = backend.put(drawn_starts(rng, 2, 2048)[:, own.cpu()])
        ranges = replace(KeyRanges.of(starts, own, window), keys=theirs)
        ranges = replace(ranges, known=(cut.positions(1), cut.positions(source)))
        q, grad = (torch.randn(512, 2, 4, 64, device=backend.device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(512, 2, 2, 64, device=backend.device, dtype=torch.bfloat16) for _ in range(2))
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        wanted, wanted_sums = exact_ranged(exact[0], exact[1], exact[2], ranges)
        out, sums = backend.kernels.attend(q, k, v, ranges)
        assert torch.equal(sums.isinf(), wanted_sums.isinf())
        ours = [out, *backend.kernels.attend_backward(grad, q, k, v, out.to(q.dtype), sums, ranges)]
        theirs_grads = torch.autograd.grad(wanted, exact, grad.double())
        for actual, expected in zip(ours, [wanted, *theirs_grads], strict=True):
            assert (actual.double() - expected).norm() <= 3e-2 * expected.norm()


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
