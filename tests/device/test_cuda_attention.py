"""Attention on NVIDIA GPUs: no scores in memory, whatever the type, and the kernel that is announced."""

from __future__ import annotations

import pytest
import torch

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.cuda import DTYPES, WORKSPACE, WORKSPACES, deterministic
from nxtrain.common.errors import BackendError
from tests.support.contract_kernels import exact_attention

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


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flex", "plain"])
@pytest.mark.parametrize(("params", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_announced_kernel_computes_the_formula(
    backend: Backend, wanted: str, params: str, dtype: torch.dtype
) -> None:
    length = 1000
    try:
        backend.choose_attention(wanted, AttentionShape(2, length, 4, 64, params))
    except BackendError as error:
        if wanted not in ("flash3", "flash4"):
            raise
        pytest.skip(str(error))  # their packages are apart from torch, and serve some GPUs only
    assert backend.attention is not None
    assert wanted in ("auto", backend.attention.kind)
    q, grad = (torch.randn(length, 2, 4, 64, device=backend.device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(length, 2, 2, 64, device=backend.device, dtype=dtype) for _ in range(2))
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = backend.kernels.attention(given[0], given[1], given[2])
    wanted_out = exact_attention(exact[0], exact[1], exact[2])
    ours = [out, *torch.autograd.grad(out, given, grad)]
    theirs = [wanted_out, *torch.autograd.grad(wanted_out, exact, grad.double())]
    for actual, expected in zip(ours, theirs, strict=True):
        assert (actual.double() - expected).norm() <= 3e-2 * expected.norm()
    backend.choose_attention("auto", AttentionShape(2, length, 4, 64, params))


@pytest.mark.parametrize(
    ("wanted", "params"),
    [
        *((wanted, "bf16") for wanted in ("auto", "flash", "flex", "plain")),
        *((wanted, "fp32") for wanted in ("auto", "flex", "plain")),  # FlashAttention takes 16-bit numbers
    ],
)
def test_deterministic_gradients_repeat_their_bits(
    backend: Backend, wanted: str, params: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen blocks of keys add to each gradient of a query, so that an order exists."""
    monkeypatch.setenv(WORKSPACE, WORKSPACES[0])
    length, dtype = 2048, DTYPES[params]
    q, grad = (torch.randn(length, 2, 4, 64, device=backend.device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(length, 2, 2, 64, device=backend.device, dtype=dtype) for _ in range(2))
    given = [x.requires_grad_() for x in (q, k, v)]
    with deterministic({WORKSPACE: WORKSPACES[0]}):
        monkeypatch.setattr(backend, "_is_deterministic", True)
        backend.choose_attention(wanted, AttentionShape(2, length, 4, 64, params))
        first = None
        for _ in range(8):
            out = backend.kernels.attention(q, k, v)
            actual = [out, *torch.autograd.grad(out, given, grad)]
            first = first or actual
            assert all(map(torch.equal, actual, first))
    monkeypatch.undo()
    backend.choose_attention("auto", AttentionShape(2, length, 4, 64, params))
