"""Flash kernel of torch for CPUs with the offsets, diagonals and windows of FlashAttention, by a mask for each tile."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.backends.flash_ranges import Call, FlashKernel, FlashRanges
from nxtrain.backends.torch_attention import repeat_heads
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.kernels import KeyRanges

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash(FlashKernel):
    """torch's kernel for CPUs, whose backward pass takes any sums, as FlashAttention's does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if call.offsets is None:
            out, log_sums = _FORWARD(*_heads(q, k, v), 0.0, False, attn_mask=_mask(q, k, call))
            return out.transpose(1, 2), log_sums
        outs, sums = [], []
        for own, theirs in _tiles(call):
            tile = Call(slice(0, 0), slice(0, 0), call.mask, None, (0, 0))
            out, log_sums = self.forward(q[None, own], k[None, theirs], v[None, theirs], tile)
            outs.append(out[0])
            sums.append(log_sums[0])
        return torch.cat(outs), torch.cat(sums, dim=1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.offsets is None:
            repeats = q.shape[2] // k.shape[2]
            given = (grad.transpose(1, 2), *_heads(q, k, v), out.transpose(1, 2), log_sums)
            grads = _BACKWARD(*(x.contiguous() for x in given), 0.0, False, attn_mask=_mask(q, k, call))
            q_grad, *rest = (x.transpose(1, 2) for x in grads)
            k_grad, v_grad = (x.unflatten(2, (-1, repeats)).sum(dim=3) for x in rest)
            return q_grad, k_grad, v_grad
        parts = []
        for own, theirs in _tiles(call):
            tile = Call(slice(0, 0), slice(0, 0), call.mask, None, (0, 0))
            rows = grad[None, own], q[None, own], k[None, theirs], v[None, theirs], out[None, own]
            parts.append(self.backward(*rows, log_sums[None, :, own], tile))
        q_grad, k_grad, v_grad = (torch.cat([x[0] for x in side]) for side in zip(*parts, strict=True))
        return q_grad, k_grad, v_grad


class FlashOnCpu(FusedKernels):
    """Kernels whose attention to ranges is that of GPUs, by the CPU's flash kernel."""

    def __init__(self) -> None:
        self.ranges = FlashRanges(CpuFlash(), WeakTensorKeyDictionary())

    def sees(self, ranges: KeyRanges) -> bool:
        return bool(self.ranges.calls(ranges))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        return self.ranges.attend(q, k, v, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.ranges.attend_backward(grad, q, k, v, out, log_sums, ranges)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, N, H) and (B, T, M, H) to (B, N, T, H), a K/V head for each query head."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, repeat_heads(k, repeats), repeat_heads(v, repeats)


def _tiles(call: Call) -> list[tuple[slice, slice]]:
    """Queries and keys of each tile."""
    assert call.offsets is not None
    queries, keys = ([slice(*pair) for pair in pairwise(side.tolist())] for side in call.offsets)
    assert max(rows.stop - rows.start for rows in queries) == call.longest[0]
    assert max(rows.stop - rows.start for rows in keys) == call.longest[1]
    return list(zip(queries, keys, strict=True))


def _mask(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """(Q, K) additive mask; the diagonal ends in the last query and the last key."""
    diagonal = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if call.mask.causal:
        hidden |= keys > diagonal
    if call.mask.window is not None:
        hidden |= keys < diagonal - call.mask.window
    assert not hidden.all(dim=1).any(), "no query of a tile is without a key"
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
