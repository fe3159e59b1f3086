"""Attention by NeuronX Distributed's own flash function on a pretended machine; imported by name in its process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronKernels
from tests.support import nki_kernels, nxd_cpu


@dataclass(frozen=True)
class Case:
    """Inputs of attention.

    Args:
        target: The chip, as NxD names it.
        batch, length, heads, kv_heads, size: Shapes.
        dtype: Of queries, keys, values and of the gradient.
        seed: Of their values.
    """

    target: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    seed: int

    def inputs(self) -> list[Tensor]:
        """Queries, keys, values and a gradient: (S, B, N, H)."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.length, self.batch, number, self.size) for number in counts]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


@dataclass(frozen=True)
class Found:
    """Results of attention.

    Args:
        note: Of the backend.
        results: Output and the gradients of queries, keys and values.
        grids: Of each kernel launch, forward and backward.
    """

    note: str
    results: list[Tensor]
    grids: list[tuple[int, int, int]]


def attended(backend: Backend, cases: Sequence[Case]) -> list[Found]:
    """Attention of each case, forward and backward, as the backend's kernels compute it."""
    nxd_cpu.prepare(cpu_mode=False)
    nki_kernels.install()
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

    found = []
    for case in cases:
        os.environ[nxd_cpu.PLATFORM] = case.target
        # Of the types, the backend gives only bfloat16 to the kernel; the function itself takes others.
        shape = AttentionShape(case.batch, case.length, case.heads, case.size, "bf16")
        backend.choose_attention("flash", shape)
        kernels: Any = backend.kernels
        assert type(kernels) is NeuronKernels
        assert kernels.flash is nki_flash_attn_func
        launches = [nki_kernels.flash_fwd.grids, nki_kernels.flash_attn_bwd.grids]
        for each in launches:
            each.clear()
        *inputs, grad = (backend.put(x) for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in inputs)
        out = kernels.attention(q, k, v)
        out.backward(grad)
        backend.step_boundary()
        results = [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
        (note,) = backend.notes()
        found.append(Found(note, [x.cpu() for x in results], [grid for each in launches for grid in each]))
    return found
