"""Test of a ring attention kernel before a run uses it, by comparison with attention on gathered keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.sdpa_kernels import first_line, relative_error, wrong_numbers
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Axis
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.parallel.context_parallel import ContextParallel

TRIAL_TOKENS = 512
"""Tokens of a rank in the test of a ring kernel: one tile of the kernel."""


def refuse_wrong_ring(
    backend: Backend, context: ContextParallel | None, world: Axis, head_size: int, wanted: str
) -> None:
    """Remove a ring attention kernel from the run unless its results are right on every rank, and record the reason.

    Every rank of the run calls this, and all ranks make the same choice. Otherwise ranks that gather would wait for
    ranks that use the ring.

    Args:
        backend: This rank's device.
        context: Context parallel attention of the run; None without context parallelism.
        world: Axis of all ranks.
        head_size: Size of an attention head.
        wanted: `backend.attention`.

    Raises:
        BackendError: The configuration requires the kernel, and a rank cannot use it.
    """
    if context is None or not backend.has_rings or backend.extracts:
        return
    lacks = _largest(float(backend.ring is None), backend, world) > 0.0
    if backend.ring is None:
        return
    why = "another rank does not have them"
    if not lacks:
        why = _failure(backend, context, world, head_size)
    if not why:
        return
    if wanted == "flash":
        raise BackendError(f"backend.attention=flash cannot run on these devices: ring kernels: {why}; set it to auto")
    backend.ring = None
    assert backend.attention is not None, "a backend with a ring kernel has chosen its attention"
    reason = f"the NKI Library's ring kernels cannot be had: {why}. Keys and values are gathered"
    backend.attention = replace(backend.attention, kind="blocked", reason=reason)


def _largest(number: float, backend: Backend, world: Axis) -> float:
    """Largest value of a number over all ranks."""
    return float(backend.collectives.all_reduce(backend.put(torch.tensor([number])), world, "max"))


def _failure(backend: Backend, context: ContextParallel, world: Axis, head_size: int) -> str:
    axis, device = context.axis, backend.device
    cut = SequenceCut(TRIAL_TOKENS * axis.size, axis.size, context.cut.layout)
    tried = replace(context, cut=cut)
    gathered = replace(tried, method="gather", ring=None)
    generator = torch.Generator().manual_seed(axis.rank)
    positions = backend.put(tried.positions)
    shapes = [(TRIAL_TOKENS, 1, heads, head_size) for heads in (2, 1, 1, 2)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    results = []
    why, worst = "", float("inf")
    try:
        for way, dtype in ((tried, torch.bfloat16), (gathered, torch.float32)):
            given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            out = way.attention(given[0], given[1], given[2], positions, None)
            results.append([out, *torch.autograd.grad(out, given, grad.to(dtype))])
        errors = [relative_error(mine, right) for mine, right in zip(*results, strict=True)]
        worst = float(torch.stack(errors).max().nan_to_num(nan=float("inf")))
    except Exception as error:  # drivers raise exceptions of any type
        why = first_line(error)
    of_all = _largest(worst, backend, world)
    return why or wrong_numbers(of_all)
