"""Attention inside of documents and windows by kernels of the NKI Library, which take bounds of the keys per query.

The kernels `attention_cte`, forward, and `attention_bwd` come with the compiler. Queries are scaled before both, since
the forward kernel with bounds takes no other scale than 1. In Neuron SDK 2.29 all sequences of a call share one row of
bounds, so that each sequence of a micro-batch is a call. In 2.33, on TorchNeuron, each sequence has its own bounds.

No Trainium has run these calls. A stand-in with their signatures holds layouts, bounds and gradients in tests.

Shapes: S sequence, N query heads, K key/value heads, H head dimension, R sequences of a call, P partitions of 128.

Source: src/nkilib_src/nkilib/core/attention/attention_cte.py and attention_bwd.py in
https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29, and attention_cte.py at 092a49d for the bounds of
each sequence; those of attention_bwd are in its `validate_inputs` of the same time.
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

Operation = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Function that calls a kernel with its constant arguments; it takes tensors and the number of cores."""


@dataclass(frozen=True)
class BoundedKernels:
    """Attention of whole rows to ranges of keys, in the form of `Kernels.attend` and `Kernels.attend_backward`.

    Args:
        forward, backward: Operations of `launches`.
        lnc: Physical cores of a logical one.
        together: Each sequence of a call has bounds of its own, and a call takes all sequences.
    """

    forward: Operation
    backward: Operation
    lnc: int
    together: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        num_heads, cores = q.shape[2], self._cores(k)
        outs, sums = [], []
        for rows, low, high in self._calls(ranges, q.shape[1]):
            queries, keys, values = (x[:, rows] for x in (scaled(q), k, v))
            bounds = low, high
            if self.together:
                bounds = low.repeat_interleave(num_heads, dim=0), high.repeat_interleave(num_heads, dim=0)  # (R * N, S)
            out, negative_peak, inverse_sum = self.forward(
                queries.permute(1, 2, 0, 3).flatten(0, 1).contiguous(),  # (R * N, S, H)
                keys.permute(1, 2, 3, 0).flatten(0, 1).contiguous(),  # (R * K, H, S)
                values.permute(1, 2, 0, 3).flatten(0, 1).contiguous(),  # (R * K, S, H)
                *(bound.unsqueeze(-1) for bound in bounds),
                cores,
            )
            outs.append(out.unflatten(0, (-1, num_heads)).permute(2, 0, 1, 3).float())
            log_sums = (-negative_peak - inverse_sum.log()).transpose(1, 2).flatten(1)  # (R * N, S)
            sums.append(log_sums.unflatten(0, (-1, num_heads)))
        return torch.cat(outs, dim=1), torch.cat(sums)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        grads, cores = [], self._cores(k)
        operands = scaled(q), k, v, out.to(q.dtype), grad.to(q.dtype)
        for rows, low, high in self._calls(ranges, q.shape[1]):
            by_head = [x[:, rows].permute(1, 2, 3, 0).contiguous() for x in operands]  # (R, N, H, S)
            sums = log_sums[rows].unflatten(2, (-1, PARTITIONS)).transpose(2, 3).contiguous()
            grads.append(self.backward(*by_head, sums, low, high, cores))
        q_grad, k_grad, v_grad = (
            torch.cat(of_rows).permute(3, 0, 1, 2).float() for of_rows in zip(*grads, strict=True)
        )
        return q_grad / math.sqrt(q.shape[3]), k_grad, v_grad

    def _cores(self, keys: Tensor) -> int:
        """Number of cores of a call. In SDK 2.29 cores divide key/value heads; later, also sequences and positions."""
        if self.together or keys.shape[2] % self.lnc == 0:
            return self.lnc
        return 1

    def _calls(self, ranges: KeyRanges, batch: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Sequences of each call, with the first key of each query and the key after the last."""
        low, high = _bounds(ranges, batch)
        if self.together:
            return [(slice(None), low, high)]
        return [(slice(row, row + 1), low[row], high[row]) for row in range(batch)]


def launches(forward: Any, backward: Any) -> tuple[Operation, Operation]:
    """Functions that call `attention_cte` and `attention_bwd`; `kernel[cores]` divides the work between cores."""

    def attention_cte(
        q: Tensor, k: Tensor, v: Tensor, bound_min: Tensor, bound_max: Tensor, cores: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = forward[cores] if cores > 1 else forward
        out: tuple[Tensor, Tensor, Tensor] = kernel(
            q,
            k,
            v,
            scale=1.0,
            causal_mask=True,
            tp_q=True,
            tp_k=False,
            cache_softmax=True,
            bound_min=bound_min,
            bound_max=bound_max,
        )
        return out

    def attention_bwd(  # 9 arguments: those of the kernel that are tensors
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        grad: Tensor,
        log_sums: Tensor,
        bound_min: Tensor,
        bound_max: Tensor,
        cores: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = backward[cores] if cores > 1 else backward
        grads: tuple[Tensor, Tensor, Tensor] = kernel(
            q,
            k,
            v,
            out,
            grad,
            log_sums,
            bound_min=bound_min,
            bound_max=bound_max,
            use_causal_mask=True,
            mixed_precision=True,  # sums in float32
            softmax_scale=1.0,
        )
        return grads

    return attention_cte, attention_bwd


def load(lnc: int) -> BoundedKernels:
    """Import the kernels of the compiler of Neuron SDK 2.29.

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
    return BoundedKernels(*launches(attention_cte, attention_bwd), lnc)


def scaled(q: Tensor) -> Tensor:
    """Queries over the root of H, so that products with keys are attention scores."""
    return q / math.sqrt(q.shape[3])


def _bounds(ranges: KeyRanges, batch: int) -> tuple[Tensor, Tensor]:
    """First key of each query, and the key after the last: (B, S) float32 each, contiguous."""
    first, after = ranges.first.float(), (ranges.last + 1).float()
    return first.expand(batch, -1).contiguous(), after.expand(batch, -1).contiguous()
