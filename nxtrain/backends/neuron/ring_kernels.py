"""Context parallel attention by the NKI Library's ring kernels, which exchange keys and values between ranks.

The kernels need one key/value head per query head, so grouped heads are copied, and the gradients of the copies are
summed. Queries are scaled before both kernels, since the causal forward kernel requires the scale 1. A rank has a
contiguous part of each sequence, or every cp-th position. The forward kernel sends keys and values around the ring. The
backward kernel sends the queries, with their outputs and gradients. The rank is a device tensor, so all ranks run the
same program.

These calls have not run on Trainium. Tests check layouts and gradients with a mock of the kernels.

Shapes: T positions of this rank, B sequences, N query heads, K key/value heads, H head dimension, P partitions of 128.

Source: src/nkilib_src/nkilib/experimental/attention/ring_attention_fwd.py in https://github.com/aws-neuron/nki-library
at 092a49d, and ring_attention_bwd.py at that commit; nki/library/api/ring-attention-fwd.html and -bwd.html of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nxtrain.backends.neuron.bounded import scaled
from nxtrain.common.layers import RingAttention


@dataclass(frozen=True)
class RingKernels(RingAttention):
    """Causal ring attention of this rank's queries to the keys of all context parallel ranks.

    Args:
        forward, backward: Operations that `ring_launches` returns.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries = scaled(q).permute(1, 2, 0, 3).contiguous()  # (B, N, T, H)
        keys, values = (_for_each_query(x, q).permute(1, 2, 0, 3).contiguous() for x in (k, v))
        out, log_sums = self.forward(queries, keys, values)
        return out.permute(2, 0, 1, 3), log_sums

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_heads = scaled(q), _for_each_query(k, q), _for_each_query(v, q), out.to(q.dtype), grad.to(q.dtype)
        by_head = [x.permute(1, 2, 3, 0).contiguous() for x in of_heads]  # (B, N, H, T)
        grads = self.backward(*by_head, log_sums)
        q_grad, k_copies, v_copies = (x.permute(3, 0, 1, 2) for x in grads)
        k_grad, v_grad = (x.unflatten(2, (k.shape[2], -1)).sum(dim=3) for x in (k_copies, v_copies))
        return q_grad / math.sqrt(q.shape[3]), k_grad, v_grad


def ring_launches(
    forward: Any, backward: Any, groups: tuple[tuple[int, ...], ...], lnc: int, *, is_striped: bool
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Return functions that call the ring kernels `ring_attention_spmd_fwd` and `ring_attention_spmd_bwd`.

    Args:
        forward, backward: NKI kernels.
        groups: Ranks of each ring, in the order of their positions.
        lnc: Physical cores per logical core.
        is_striped: A rank has every cp-th position; False if a rank has a contiguous part.
    """
    size = len(groups[0])
    if lnc > 1:
        forward, backward = forward[lnc], backward[lnc]

    def ring_attention_fwd(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = forward(
            q,
            k,
            v,
            replica_groups=groups,
            num_workers=size,
            softmax_scale=1.0,
            use_causal_mask=True,
            striped_input=is_striped,
            training=True,
            tp_q=True,
            tp_k=True,
        )
        return out

    def ring_attention_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = backward(
            q,
            k,
            v,
            out,
            grad,
            log_sums,
            use_causal_mask=True,
            mixed_precision=True,  # sums in float32
            softmax_scale=1.0,
            num_workers=size,
            lnc_size=lnc,
            replica_groups=groups,
            striped_attention=is_striped,
        )
        return grads

    return ring_attention_fwd, ring_attention_bwd


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key/value heads (T, B, K, H) for each query head: (T, B, N, H)."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)
