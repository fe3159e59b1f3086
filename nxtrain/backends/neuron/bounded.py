"""Attention inside of documents and windows by kernels of the NKI Library, which take bounds of the keys per query.

The kernels are those that the compiler of Neuron SDK 2.29 brings along: `attention_cte` forward, and `attention_bwd`.
Queries are scaled before both, since the forward kernel with bounds takes a scale of 1 alone. The backward kernel of
this release has one row of bounds for all sequences, so that each sequence of a micro-batch is a call.

No Trainium has run these calls. A stand-in with their signatures holds layouts, bounds and gradients in tests.

Shapes: S sequence, N query heads, K key/value heads, H head dimension, P partitions of 128.

Source: src/nkilib_src/nkilib/core/attention/attention_cte.py and attention_bwd.py in
https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.errors import BackendError
from nxtrain.common.kernels import KeyRanges

PARTITIONS = 128
"""Queries of a tile of both kernels."""

Kernel = Callable[..., Any]
"""A kernel of NKI; `kernel[cores]` shares the work between the physical cores of a logical one."""


@dataclass(frozen=True)
class BoundedKernels:
    """Attention of whole rows to ranges of keys, as `Kernels.attend` and `Kernels.attend_backward` have it.

    Args:
        forward: `attention_cte`.
        backward: `attention_bwd`.
        lnc: Physical cores of a logical one. They share key/value heads.
    """

    forward: Any
    backward: Any
    lnc: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        outs, sums = [], []
        kernel = self._shared(self.forward, k.shape[2])
        for row, (low, high) in enumerate(_bounds(ranges, q.shape[1])):
            queries, keys, values = (x[:, row] for x in (_scaled(q), k, v))
            out, negative_peak, inverse_sum = kernel(
                queries.transpose(0, 1).contiguous(),  # (N, S, H)
                keys.permute(1, 2, 0).contiguous(),  # (K, H, S)
                values.transpose(0, 1).contiguous(),  # (K, S, H)
                scale=1.0,
                causal_mask=True,
                tp_q=True,
                tp_k=False,
                cache_softmax=True,
                bound_min=low.unsqueeze(1),
                bound_max=high.unsqueeze(1),
            )
            outs.append(out.transpose(0, 1).float())
            sums.append((-negative_peak - inverse_sum.log()).transpose(1, 2).flatten(1))  # (N, S)
        return torch.stack(outs, dim=1), torch.stack(sums)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        grads = []
        kernel = self._shared(self.backward, k.shape[2])
        operands = _scaled(q), k, v, out.to(q.dtype), grad.to(q.dtype)
        for row, (low, high) in enumerate(_bounds(ranges, q.shape[1])):
            by_head = [x[:, row].permute(1, 2, 0).unsqueeze(0).contiguous() for x in operands]  # (1, N, H, S)
            sums = log_sums[row].unflatten(1, (-1, PARTITIONS)).transpose(1, 2).unsqueeze(0).contiguous()
            grads.append(
                kernel(
                    *by_head,
                    sums,
                    bound_min=low,
                    bound_max=high,
                    use_causal_mask=True,
                    mixed_precision=True,  # sums in float32
                    softmax_scale=1.0,
                )
            )
        q_grad, k_grad, v_grad = (
            torch.cat(of_rows).permute(3, 0, 1, 2).float() for of_rows in zip(*grads, strict=True)
        )
        return q_grad / math.sqrt(q.shape[3]), k_grad, v_grad

    def _shared(self, kernel: Any, num_kv_heads: int) -> Kernel:
        """Kernel on the cores among which the heads divide."""
        if self.lnc > 1 and num_kv_heads % self.lnc == 0:
            return kernel[self.lnc]  # type: ignore[no-any-return]
        return kernel  # type: ignore[no-any-return]


def load(lnc: int) -> BoundedKernels:
    """Import the kernels of the compiler.

    Raises:
        BackendError: The kernels cannot be imported.
    """
    try:
        from nkilib.core.attention.attention_bwd import attention_bwd
        from nkilib.core.attention.attention_cte import attention_cte
    except ImportError as error:
        raise BackendError(
            f"Neuron SDK 2.29 is installed, but the attention of its NKI Library cannot be imported: {error}; use "
            "backend.attention=plain, or install packages of one release of the Neuron SDK"
        ) from error
    return BoundedKernels(attention_cte, attention_bwd, lnc)


def _scaled(q: Tensor) -> Tensor:
    return q / math.sqrt(q.shape[3])


def _bounds(ranges: KeyRanges, batch: int) -> list[tuple[Tensor, Tensor]]:
    """First key of each query and the one after its last, (S,) float32 each, of each sequence."""
    after = (ranges.last + 1).float()
    return [(first, after) for first in ranges.first.float().expand(batch, -1)]
