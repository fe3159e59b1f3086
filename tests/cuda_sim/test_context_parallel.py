"""Attention between ranks and inside of documents on a pretended GPU: fused kernels alone, and the host never waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nxtrain.backends.base import BackendSettings
from nxtrain.common.sequence_cut import ContextMethod, CutLayout, SequenceCut
from tests.support.cuda_sim import Record, SimulatedGpu, opened_gpu, recorded

CP, SEQ_LEN = 4, 4096
BACKWARD = "flash_bwd_dq_dk_dv"
DOCUMENTS = (0, 700, 1500, 3900)
"""First positions of the documents of a row: some end inside of a rank's piece, and some go on."""


def attention_of_a_rank(
    rank: int, method: ContextMethod, layout: CutLayout, documents: bool, window: int | None, deterministic: bool
) -> tuple[str, Record, int]:
    """Announced kind, record of a second forward and backward pass, and most bytes that the passes allocate."""
    import torch

    from nxtrain.backends.attention_choice import AttentionShape
    from nxtrain.common.mesh import Mesh
    from nxtrain.parallel.context_parallel import ContextParallel
    from tests.support.contract_functions import Echo

    shape = AttentionShape(
        1, SEQ_LEN, 4, 64, "bf16", documents=documents, cp=CP, cp_method=method, cp_layout=layout, window=window
    )
    with opened_gpu(settings=BackendSettings(deterministic=deterministic)) as backend:
        backend.choose_attention("auto", shape)
        cut = SequenceCut.of(SEQ_LEN, CP, layout)
        context = ContextParallel(Mesh.build(CP, rank, cp=CP).cp, cut, method, Echo(), backend.kernels)
        positions = backend.put(context.positions)
        starts = backend.put(starts_of_row()[:, context.positions].contiguous()) if documents else None
        q, k, v = (
            torch.zeros(SEQ_LEN // CP, 1, heads, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        grad = torch.zeros_like(q)
        torch.autograd.grad(context.attention(q, k, v, positions, starts, window), (q, k, v), grad)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with recorded() as record:
            torch.autograd.grad(context.attention(q, k, v, positions, starts, window), (q, k, v), grad)
        return backend.attention.kind, record, torch.cuda.max_memory_allocated() - held


def starts_of_row() -> Any:
    """(1, S) first position of each position's document."""
    import torch

    return torch.tensor([[max(start for start in DOCUMENTS if start <= position) for position in range(SEQ_LEN)]])


def calls(record: Record) -> tuple[int, int]:
    """Calls of the fused kernel, forward and backward; a forward call of few rows has a second kernel for its sums."""
    forward = [kernel for kernel in record.kernels if "flash_fwd" in kernel and "combine" not in kernel]
    return len(forward), sum(BACKWARD in kernel for kernel in record.kernels)


@pytest.mark.parametrize("rank", range(CP))
def test_a_step_of_the_ring_is_one_call_of_the_fused_kernel(gpu: SimulatedGpu, rank: int) -> None:
    """Pieces from each end: the own block is causal in the order of its rows, and the others are seen whole."""
    kind, record, peak = gpu.run(attention_of_a_rank, rank, "ring", "zigzag", False, None, False)
    assert kind == "flash"
    assert calls(record) == (CP, CP)
    held_to_fused_kernels(record, peak)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("method", "layout"), [("ring", "striped"), ("ring", "contiguous"), ("gather", "zigzag")])
def test_layouts_documents_and_windows_take_the_fused_kernel(
    gpu: SimulatedGpu, method: str, layout: str, window: int | None, documents: bool
) -> None:
    for rank in (1, CP - 1):
        kind, record, peak = gpu.run(attention_of_a_rank, rank, method, layout, documents, window, False)
        assert kind == "flash"
        forward, backward = calls(record)
        assert forward == backward
        assert 1 <= forward <= 3 * CP
        held_to_fused_kernels(record, peak)


def held_to_fused_kernels(record: Record, peak_bytes: int) -> None:
    """Attention of one kind of kernel forward and one backward, without scores of all pairs, and without a wait."""
    assert not any("softmax" in kernel.lower() or "gemm" in kernel.lower() for kernel in record.kernels)
    assert record.host_waits == []
    assert peak_bytes < 4 * (SEQ_LEN // CP) * SEQ_LEN * 2, "less than the scores of a rank's queries in bf16"


@pytest.fixture(scope="module")
def deterministic_gpu() -> Iterator[SimulatedGpu]:
    """A process of its own: torch reads the variable of cuBLAS once."""
    opened = SimulatedGpu(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    yield opened
    opened.close()


def test_gradients_of_blocks_are_added_in_one_order(deterministic_gpu: SimulatedGpu) -> None:
    grids = {}
    for deterministic in (False, True):
        kind, record, _ = deterministic_gpu.run(attention_of_a_rank, 1, "ring", "zigzag", True, None, deterministic)
        assert kind == "flash"
        assert record.host_waits == []
        grids[deterministic] = [
            event.fields["grid"] for event in record.of("kernel") if BACKWARD in event.fields["name"]
        ]
    assert len(grids[False]) == len(grids[True]) > 0
    assert grids[False] != grids[True], "as many blocks as the keys have, or as the GPU computes at once"


def documents_of_one_rank(batch: int, window: int | None) -> tuple[str, Record]:
    """Announced kind, and record of a second pass of packed documents of whole rows."""
    import torch

    from nxtrain.backends.attention_choice import AttentionShape

    shape = AttentionShape(batch, SEQ_LEN, 4, 64, "bf16", documents=True, window=window)
    with opened_gpu() as backend:
        backend.choose_attention("auto", shape)
        starts = backend.put(starts_of_row().expand(batch, -1).contiguous())
        q, k, v = (
            torch.zeros(SEQ_LEN, batch, heads, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        grad, attention = torch.zeros_like(q), backend.kernels.document_attention
        torch.autograd.grad(attention(q, k, v, starts, window), (q, k, v), grad)
        with recorded() as record:
            torch.autograd.grad(attention(q, k, v, starts, window), (q, k, v), grad)
        return backend.attention.kind, record


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_are_one_call_that_copies_no_row(gpu: SimulatedGpu, batch: int) -> None:
    """Of several sequences the rows are put one after the other first."""
    kind, record = gpu.run(documents_of_one_rank, batch, None)
    assert kind == "flash"
    assert calls(record) == (1, 1)
    assert record.host_waits == []
    others = [kernel for kernel in record.kernels if "flash" not in kernel and "reduce_kernel" not in kernel]
    # Positions of the row, and the gradients of grouped heads, which the kernel sums.
    assert (len(others) <= 2) == (batch == 1), others
