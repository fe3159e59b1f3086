"""Kernels of a pretended GPU by name: those of attention as configured, compiled or not, and those of the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

FLASH, EFFICIENT = "flash_", "fmha_cutlass"


def attend(wanted: str, params: str, compiled: bool) -> tuple[str, Record]:
    """Announced kind of attention, and record of a forward and a backward pass."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from nxtrain.backends.attention_choice import AttentionShape

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[params]
    release = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]  # one that prefers elementary operations
    with sdpa_kernel(release, set_priority=True), opened_gpu() as backend:
        backend.choose_attention(wanted, AttentionShape(2, 512, 4, 64, params, compiled=compiled))
        q, kv = (
            torch.zeros(512, 2, heads, 64, device=backend.device, dtype=dtype, requires_grad=True) for heads in (4, 2)
        )
        call: Callable[..., Any] = backend.kernels.attention
        if compiled:
            call = torch.compile(call, fullgraph=True, dynamic=False)
        call(q, kv, kv).sum().backward()
        with recorded() as record:
            call(q, kv, kv).sum().backward()
        return backend.attention.kind, record


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("wanted", "params", "kind", "name"),
    [
        ("auto", "bf16", "flash", FLASH),
        ("flash", "bf16", "flash", FLASH),
        ("auto", "fp32", "efficient", EFFICIENT),
        ("plain", "bf16", "plain", ""),
    ],
)
def test_the_announced_kernel_runs_whatever_the_release_prefers(
    gpu: SimulatedGpu, wanted: str, params: str, kind: str, name: str, compiled: bool
) -> None:
    """The pretended GPU has no cuDNN, so that `auto` takes the next kernel."""
    actual, record = gpu.run(attend, wanted, params, compiled)
    assert actual == kind
    ran = [part for part in (FLASH, EFFICIENT) if any(part in kernel for kernel in record.kernels)]
    assert ran == ([name] if name else [])
    assert any("softmax" in kernel.lower() for kernel in record.kernels) == (not name)
    assert record.host_waits == []


def grouped_heads(params: str, head_size: int) -> tuple[str, list[str]]:
    """Announcement of `auto` for two query heads on each key/value head, and kernels of a pass."""
    import torch

    from nxtrain.backends.attention_choice import AttentionShape
    from nxtrain.backends.cuda import DTYPES

    with opened_gpu() as backend:
        backend.choose_attention("auto", AttentionShape(2, 4096, 4, head_size, params))
        q, kv = (
            torch.zeros(4096, 2, heads, head_size, device=backend.device, dtype=DTYPES[params], requires_grad=True)
            for heads in (4, 2)
        )
        with recorded() as record:
            backend.kernels.attention(q, kv, kv).sum().backward()
        return str(backend.attention), record.kernels


@pytest.mark.parametrize(
    ("capability", "params", "head_size"), [(75, "fp16", 64), (75, "fp32", 64), (90, "bf16", 288), (90, "fp32", 288)]
)
def test_grouped_heads_take_the_memory_efficient_kernel_where_no_other_can(
    capability: int, params: str, head_size: int
) -> None:
    """GPUs before Ampere, and wide heads. The kernel takes no groups, so that its trial must not give it any."""
    with closing(SimulatedGpu(CUDA_SIM_CAPABILITY=str(capability))) as gpu:
        announced, kernels = gpu.run(grouped_heads, params, head_size)
    assert announced.startswith("efficient attention: torch's memory-efficient kernel"), announced
    assert any(EFFICIENT in kernel for kernel in kernels)
    assert not any("softmax" in kernel.lower() for kernel in kernels)


def losses(chunk_mib: int) -> Record:
    """Record of a loss, forward and backward, over a large vocabulary."""
    import torch

    from nxtrain.common.mesh import Mesh
    from nxtrain.common.sharding import Init
    from nxtrain.parallel.loss import VocabHead
    from nxtrain.parallel.regions import TensorParallel

    with opened_gpu() as backend:
        parallel = TensorParallel(Mesh.build(1, 0).tp, backend.collectives, backend.kernels, torch.bfloat16)
        head = VocabHead(32_000, 64, Init(), parallel, chunk_bytes=chunk_mib << 20).to_empty(device=backend.device)
        hidden = torch.zeros(4096, 1, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(4096, 1, device=backend.device, dtype=torch.int64)
        with recorded() as record:
            head.loss(hidden, targets).backward()
        return record


def test_the_gradient_of_the_output_matrix_is_summed_by_its_products(gpu: SimulatedGpu) -> None:
    """Each chunk has three products, of which the third one adds to float32; one chunk alone needs no sum."""
    counts = {mib: gpu.run(losses, mib) for mib in (64, 128, 1024)}
    products = {mib: [k for k in record.kernels if "gemm" in k.lower()] for mib, record in counts.items()}
    assert {mib: len(result) for mib, result in products.items()} == {64: 24, 128: 12, 1024: 3}
    per_chunk = (len(counts[64].kernels) - len(counts[128].kernels)) / 4
    assert per_chunk <= 36
    assert len(counts[1024].kernels) < len(counts[128].kernels)


def restored(dim: int) -> Record:
    """Record of the second time that a rank restores its rows or columns of a matrix in NF4."""
    import torch

    from nxtrain.backends.nf4 import Packing, Part

    with opened_gpu() as backend:
        packing = Packing((Part((256, 256), dim, 0, 128),), (128, 256) if dim == 0 else (256, 128), torch.bfloat16)
        packed = backend.put(torch.zeros(packing.packed_shape, dtype=torch.bfloat16))
        packing.restore(packed)
        with recorded() as record:
            packing.restore(packed)
        return record


@pytest.mark.parametrize("dim", [0, 1])
def test_a_quantized_matrix_is_restored_by_few_kernels(gpu: SimulatedGpu, dim: int) -> None:
    """Scales are widened, looked up, multiplied with the factors of their groups and shifted; then codes are."""
    pytest.importorskip("bitsandbytes")
    record = gpu.run(restored, dim)
    assert len(record.kernels) == 6
    assert record.host_waits == []
