"""The NKI Library's ring kernels compute attention between ranks, in layouts that the library takes.

Reference: the softmax by its formula in float64. The kernels are stand-ins with the signatures, layouts and conditions
of the true ones (`tests/support/nki_ring.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionChoice
from nxtrain.backends.base import Backend
from nxtrain.backends.neuron import ring_kernels
from nxtrain.backends.neuron.bounded import scaled
from nxtrain.backends.neuron.ring_kernels import RingKernels, ring_launches
from nxtrain.backends.ranged_attention import whole_rows
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import CutLayout, SequenceCut
from nxtrain.parallel.context_parallel import ContextParallel
from nxtrain.train.ring_trial import refuse_wrong_ring
from tests.support.contract_ranges import exact_ranged
from tests.support.nki_ring import ring_attention_spmd_bwd, ring_attention_spmd_fwd
from tests.support.ranks import RankPool

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Largest error by type, relative to the L2 norm."""


def drawn(seed: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and a gradient of whole sequences."""
    rng = Random(seed)
    batch, groups, width = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((8, 16))
    generator = torch.Generator().manual_seed(seed)
    heads = groups * rng.choice((1, 3))
    shapes = [(length, batch, number, width) for number in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def context_of(backend: Backend, cp: int, layout: CutLayout, *, lnc: int = 2) -> ContextParallel:
    """Ranks of rings within the world, which have the stand-ins."""
    axis = Mesh.build(backend.world, backend.rank, cp=cp).cp
    kernels = ring_attention_spmd_fwd, ring_attention_spmd_bwd
    launches = ring_launches(*kernels, tuple(map(tuple, axis.groups)), lnc, is_striped=layout == "striped")
    cut = SequenceCut(128 * cp, cp, layout)
    return ContextParallel(axis, cut, "gather", backend.collectives, backend.kernels, RingKernels(*launches))


def attended(
    backend: Backend, cp: int, layout: CutLayout, seed: int, dtype: torch.dtype, mutant: str = ""
) -> list[Tensor]:
    """Output and gradients of this rank."""
    with MUTANTS[mutant]():
        context = context_of(backend, cp, layout)
        *given, grad = (x[context.positions].clone() for x in drawn(seed, context.cut.seq_len, dtype))
        q, k, v = (x.requires_grad_() for x in given)
        out = context.attention(q, k, v, context.positions, None)
        out.backward(grad)
    return [out.detach(), *(x.grad for x in given if x.grad is not None)]


def largest_error(ranks: RankPool, seed: int, dtype: torch.dtype, mutant: str = "") -> float:
    """Largest relative error of a rank, in a drawn world of one or two rings."""
    rng = Random(seed)
    cp, rings = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
    layout: CutLayout = rng.choice(("contiguous", "striped"))
    results = ranks.run(cp * rings, attended, cp, layout, seed, dtype, mutant)
    *operands, grad = (x.double() for x in drawn(seed, 128 * cp, dtype))
    q, k, v = (x.requires_grad_() for x in operands)
    out, _ = exact_ranged(q, k, v, whole_rows(q, None))
    out.backward(grad)
    cut, errors = SequenceCut(128 * cp, cp, layout), []
    for rank, found in enumerate(results):
        for mine, whole in zip(found, (out, q.grad, k.grad, v.grad), strict=True):
            assert whole is not None
            assert mine.dtype == dtype
            wanted = whole.detach()[list(cut.listed(rank % cp))]
            errors.append(float((mine.double() - wanted).norm() / wanted.norm()))
    return max(errors)


def _scaled_twice() -> AbstractContextManager[Any]:
    return patch.object(ring_kernels, "scaled", lambda q: scaled(scaled(q)))


def _mean_of_copies() -> AbstractContextManager[Any]:
    sound = RingKernels.attend_backward

    def backward(self: RingKernels, grad: Tensor, q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        copies = q.shape[2] // k.shape[2]
        q_grad, k_grad, v_grad = sound(self, grad, q, k, *rest)
        return q_grad, k_grad / copies, v_grad / copies

    return patch.object(RingKernels, "attend_backward", backward)


def _stripes_for_pieces() -> AbstractContextManager[Any]:
    sound = ring_launches

    def swapped(*given: Any, is_striped: bool) -> Any:
        return sound(*given, is_striped=not is_striped)

    return patch(f"{__name__}.ring_launches", swapped)


def _sums_of_another_layout() -> AbstractContextManager[Any]:
    sound = RingKernels.attend

    def attend(self: RingKernels, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sums = sound(self, *qkv)
        return out, log_sums.flip(2)

    return patch.object(RingKernels, "attend", attend)


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "queries scaled twice": _scaled_twice,
    "mean of the gradients of copied heads": _mean_of_copies,
    "stripes for pieces": _stripes_for_pieces,
    "sums of another layout": _sums_of_another_layout,
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("seed", range(6))
def test_rings_compute_the_softmax_and_its_gradients(ranks: RankPool, seed: int, dtype: torch.dtype) -> None:
    assert largest_error(ranks, seed, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name])
def test_a_wrong_layout_or_factor_is_noticed(ranks: RankPool, mutant: str) -> None:
    errors = [largest_error(ranks, seed, torch.float32, mutant) for seed in range(3)]
    assert max(errors) > 1e-3


def tried(
    backend: Backend, cp: int, layout: CutLayout, wrong_rank: int | None, lacking_rank: int | None, wanted: str
) -> tuple[bool, str]:
    """True if the kernel stays after the trial, and the announced choice; kernels of ranks may be wrong or absent."""
    context = context_of(backend, cp, layout)
    kernel = context.ring
    assert isinstance(kernel, RingKernels)
    if backend.rank == wrong_rank:
        sound = kernel.forward

        def forward(*qkv: Tensor) -> tuple[Tensor, Tensor]:
            out, log_sums = sound(*qkv)
            return out * 1.5, log_sums

        kernel = RingKernels(forward, kernel.backward)
    ring = None if backend.rank == lacking_rank else kernel
    context = ContextParallel(context.axis, context.cut, "gather", backend.collectives, backend.kernels, ring)
    world = Mesh.build(backend.world, backend.rank, cp=cp).all
    backend.ring, backend.attention = ring, AttentionChoice("ring" if ring else "blocked", "as this test asks")
    try:
        with patch.object(type(backend), "has_rings", True):
            refuse_wrong_ring(backend, context, world, 16, wanted)
        return backend.ring is not None, str(backend.attention)
    except BackendError as error:
        return False, str(error)
    finally:
        backend.ring = backend.attention = None


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_a_trial_keeps_right_kernels(ranks: RankPool, layout: CutLayout) -> None:
    assert ranks.run(2, tried, 2, layout, None, None, "auto") == [(True, "ring attention: as this test asks")] * 2


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_all_rings_leave_out_a_kernel_that_is_wrong_on_one_rank(ranks: RankPool, layout: CutLayout) -> None:
    for kept, said in ranks.run(4, tried, 2, layout, 3, None, "auto"):
        assert not kept
        assert said.startswith("blocked attention: the NKI Library's ring kernels cannot be had: its numbers are off")
        assert said.endswith("Keys and values are gathered")
    for kept, said in ranks.run(2, tried, 2, layout, 1, None, "flash"):
        assert not kept
        assert said.startswith("backend.attention=flash cannot run on these devices: ring kernels: its numbers are off")


def test_no_rank_waits_for_one_without_the_kernels(ranks: RankPool) -> None:
    found = ranks.run(2, tried, 2, "striped", None, 1, "auto")
    assert [kept for kept, _ in found] == [False, False]
    assert "cannot be had: another rank does not have them. Keys and values are gathered" in found[0][1]
    assert found[1][1] == "blocked attention: as this test asks"
