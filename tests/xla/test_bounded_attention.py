"""A Neuron backend with the NKI Library of SDK 2.29 takes its attention with bounds, and computes attention with it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.backends.ranged_attention import whole_rows
from tests.support import nki_bounded
from tests.support.contract_ranges import drawn_starts, exact_ranged
from tests.support.xla_engine import run_devices

LENGTH, TOLERANCE = 512, 1e-2


def operands(seed: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values and a gradient in bf16, and first positions of documents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LENGTH, 2, heads, 16) for heads in (4, 2, 2, 4)]
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    return tensors, drawn_starts(Random(seed), 2, LENGTH)


def attended(backend: Backend, window: int | None) -> tuple[str, list[int], list[Tensor]]:
    """Announcement, cores of each call, and output and gradients of a Neuron backend."""
    nki_bounded.install()
    vars(sdk)["detect"] = lambda: SdkVersion(2, 29)
    backend.choose_attention("auto", AttentionShape(2, LENGTH, 4, 16, "bf16", documents=True, window=window))
    tensors, starts = operands(window or 0)
    *inputs, grad = (backend.put(x) for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = backend.kernels.document_attention(q, k, v, backend.put(starts), window)
    out.backward(grad)
    backend.step_boundary()
    results = [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
    cores = [*nki_bounded.attention_cte.cores, *nki_bounded.attention_bwd.cores]
    return backend.notes()[0], cores, [x.cpu() for x in results]


def test_documents_go_through_the_kernels_of_the_library(tmp_path: Path) -> None:
    for window in (None, 100):
        (found,) = run_devices(1, attended, window, folder=tmp_path, neuron={}, instance="trn2.48xlarge")
        note, cores, results = found
        assert note.startswith("bounded attention: data.doc_mask=true keeps documents apart")
        assert cores == [2] * 4, "a call for each of two sequences, forward and backward, on both cores"
        (*inputs, grad), starts = operands(window or 0)
        wide = [x.double().requires_grad_() for x in inputs]
        wanted, _ = exact_ranged(wide[0], wide[1], wide[2], whole_rows(wide[0], starts, window))
        exact = [wanted.detach(), *torch.autograd.grad(wanted, wide, grad.double())]
        for ours, theirs in zip(results, exact, strict=True):
            assert float((ours.double() - theirs).norm() / theirs.norm()) < TOLERANCE
