"""Attention for packed documents and sliding windows by NKI Library kernels with key bounds per query.

The forward kernel `attention_cte` and the backward kernel `attention_bwd` come with the Neuron compiler. Queries are
scaled before both kernels, since the forward kernel with bounds requires the scale 1. In Neuron SDK 2.29 all sequences
of a call share the bounds, so each sequence of a micro-batch is one call. In 2.33, on TorchNeuron, each sequence has
its own bounds.

These calls have not run on Trainium. Tests check layouts, bounds and gradients with a mock of the kernels.

Shapes: S sequence, N query heads, K key/value heads, H head dimension, R sequences of a call, P partitions of 128.

Source: src/nkilib_src/nkilib/core/attention/attention_cte.py and attention_bwd.py in
https://github.com/aws-neuron/nki-library at d2ad3a5, its tag 2.29. For the bounds of each sequence, attention_cte.py at
092a49d, and `validate_inputs` of attention_bwd.py at that commit.
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
"""Queries per tile of the forward and the backward kernel."""

Operation = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Function of tensors and a number of cores that calls a kernel with its constant arguments."""


@dataclass(frozen=True)
class BoundedKernels:
    """Attention with key bounds per query by the NKI Library, for `Kernels.attend` and `Kernels.attend_backward`.

    Args:
        forward, backward: Operations that `launches` returns.
        lnc: Physical cores per logical core.
        together: One call computes all sequences, each with its own bounds.
    """

    forward: Operation
    backward: Operation
    lnc: int
    together: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Compute `Kernels.attend` with the NKI forward kernel."""
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
        """Compute `Kernels.attend_backward` with the NKI backward kernel."""
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
        """Physical cores of a kernel call.

        In SDK 2.29 a call splits key/value heads over cores; later releases also split sequences and positions.
        """
        if self.together or keys.shape[2] % self.lnc == 0:
            return self.lnc
        return 1

    def _calls(self, ranges: KeyRanges, batch: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Return each kernel call: its sequences, and the first key and the key after the last of each query."""
        low, high = _bounds(ranges, batch)
        if self.together:
            return [(slice(None), low, high)]
        return [(slice(row, row + 1), low[row], high[row]) for row in range(batch)]


def launches(forward: Any, backward: Any) -> tuple[Operation, Operation]:
    """Return functions that call `attention_cte` and `attention_bwd`, split over physical cores by `kernel[cores]`."""

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
    """Import the attention kernels with key bounds of Neuron SDK 2.29.

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
    """Divide queries by the square root of H, so that their products with keys are attention scores."""
    return q / math.sqrt(q.shape[3])


def _bounds(ranges: KeyRanges, batch: int) -> tuple[Tensor, Tensor]:
    """Return the first key of each query, and the key after its last: (B, S) float32 each, contiguous."""
    first, after = ranges.first.float(), (ranges.last + 1).float()
    return first.expand(batch, -1).contiguous(), after.expand(batch, -1).contiguous()
