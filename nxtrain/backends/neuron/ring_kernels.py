"""Attention of context parallel ranks by the NKI Library's ring kernels, which pass keys and values on themselves.

Every query head has keys and values of its own in the kernels, so that shared heads are copied, and the gradients of
the copies are summed. Queries are scaled before both kernels, since the causal forward kernel takes a scale of 1 alone.
A rank has a piece of each sequence, or every cp-th position. Forward, keys and values travel; backward, the queries and
all that belongs to them. The rank is data of the device, so that one program serves all ranks.

No Trainium has run these calls. A stand-in with their signatures holds layouts and gradients in tests.

Shapes: T positions of this rank, B sequences, N query heads, K key/value heads, H head dimension, P partitions of 128.

Source: src/nkilib_src/nkilib/experimental/attention/ring_attention_fwd.py in https://github.com/aws-neuron/nki-library
at 092a49d, and ring_attention_bwd.py of the same time; nki/library/api/ring-attention-fwd.html and -bwd.html of
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
    """Causal attention of this rank's queries to the keys of all ranks.

    Args:
        forward, backward: Operations of `ring_launches`.
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
    """Operations of `ring_attention_spmd_fwd` and `ring_attention_spmd_bwd`.

    Args:
        groups: Ranks of each ring, in the order of their positions.
        lnc: Physical cores of a logical one.
        is_striped: A rank has every cp-th position; False: a piece.
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
    """(T, B, K, H) to (T, B, N, H), a copy of a head for each query head that shares it."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)
