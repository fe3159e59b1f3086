"""Flash attention through NeuronX Distributed's own function is attention: forward and backward, against float64.

The function is NxD's, with its autograd; its kernels, which are compiled for the device, are plain operations
(`tests/support/nki_kernels.py`). `tests/support/nxd_cpu.py` says how to run these. Without NxD,
`tests/unit/backends/test_neuron_attention.py` holds the layouts and the signature.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronKernels
from tests.support import nki_kernels, nxd_cpu
from tests.support.xla_engine import run_devices


@dataclass(frozen=True)
class Case:
    """Inputs of attention."""

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
    """Results of attention."""

    note: str
    results: list[Tensor]
    grids: list[tuple[int, int, int]]


def attended(backend: Backend, cases: Sequence[Case]) -> list[Found]:
    """Attention of each case, forward and backward, as the backend's kernels compute it."""
    nxd_cpu.prepare(cpu_mode=False)
    nki_kernels.install()
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

    collected = []
    for case in cases:
        os.environ[nxd_cpu.PLATFORM] = case.target
        # Of the types, the backend gives only bfloat16 to the kernel; the function itself takes others.
        shape = AttentionShape(case.batch, case.length, case.heads, case.size, "bf16")
        backend.choose_attention("flash", shape)
        kernels: Any = backend.kernels
        assert type(kernels) is NeuronKernels
        assert kernels.flash is nki_flash_attn_func
        launches = [nki_kernels.flash_fwd.grids, nki_kernels.flash_attn_bwd.grids]
        for launch in launches:
            launch.clear()
        *inputs, grad = (backend.put(x) for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in inputs)
        out = kernels.attention(q, k, v)
        out.backward(grad)
        backend.step_boundary()
        results = [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
        (note,) = backend.notes()
        collected.append(Found(note, [x.cpu() for x in results], [grid for launch in launches for grid in launch]))
    return collected


pytestmark = pytest.mark.nxd

SEED = 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Largest error by type, relative to the L2 norm: of rounding the output, which the backward pass starts from, once."""


def drawn(target: str, dtype: torch.dtype, number: int) -> Case:
    """A case that the kernel's conditions allow."""
    draw = random.Random(f"{SEED} {target} {dtype} {number}")
    heads = draw.choice([2, 4])
    kv_heads = draw.choice([n for n in (1, 2, 4) if heads % n == 0])
    batch, length = draw.choice([(1, 2048), (2, 2048), (1, 4096)])
    return Case(target, batch, length, heads, kv_heads, draw.choice([8, 24, 64, 128]), dtype, number)


def wanted(case: Case) -> list[Tensor]:
    """Output and gradients by torch in float64."""
    *inputs, grad = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize(("target", "instance", "lnc"), [("trn1", "trn1.32xlarge", 1), ("trn2", "trn2.48xlarge", 2)])
def test_attention_is_that_of_torch_in_float64(target: str, instance: str, lnc: int, tmp_path: Path) -> None:
    cases = [drawn(target, dtype, number) for dtype in TOLERANCE for number in range(2)]
    print(f"seed {SEED}: {cases}")
    actual: list[Found]
    (actual,) = run_devices(1, attended, cases, folder=tmp_path, neuron={}, instance=instance)
    for case, ours in zip(cases, actual, strict=True):
        assert ours.note.startswith("flash attention: NKI's kernel of neuronx-distributed 0.")
        assert ours.grids == [(case.batch, case.heads, lnc)] * 2, "a launch forward, one backward"
        for name, mine, theirs in zip(("out", "dq", "dk", "dv"), ours.results, wanted(case), strict=True):
            assert mine.shape == theirs.shape
            assert mine.dtype == case.dtype
            error = ((mine.double() - theirs).norm() / theirs.norm()).item()
            assert error < TOLERANCE[case.dtype], (name, case, error)
