"""Attention by NKI's flash kernel, called through NeuronX Distributed's `nki_flash_attn_func`.

Shapes: S sequence, B batch, N query heads, K key/value heads, H head dimension.
"""

from __future__ import annotations

import math
import os
from typing import Protocol, cast

from torch import Tensor

from nxtrain.backends.torch_attention import repeat_heads
from nxtrain.common.errors import BackendError


class FlashFunction(Protocol):
    """Signature of NxD's `nki_flash_attn_func` (releases 0.16 to 0.18), with the arguments that nxtrain passes."""

    def __call__(  # 8 arguments: those of the kernel
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lnc: int,
        softmax_scale: float,
        causal: bool,
        mixed_precision: bool,
        transpose_nki_inputs: bool,
    ) -> Tensor:
        """Compute attention of q, k and v, (B, N, H, S) each; return (B, N, S, H), unlike NxD's docstring says."""
        ...


def load() -> FlashFunction:
    """Import NxD's flash attention function.

    Raises:
        BackendError: The function cannot be imported, or XLA_DOWNCAST_BF16 would make it inexact.
    """
    try:
        from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
    except ImportError as error:
        raise BackendError(
            f"neuronx-distributed is installed, but its flash attention cannot be imported: {error}; use "
            "backend.attention=plain, or install packages of one release of the Neuron SDK"
        ) from error
    if "XLA_DOWNCAST_BF16" in os.environ:
        # Other values are refused earlier. For torch-xla `0` means off; NxD only checks if the variable is set.
        raise BackendError(
            "XLA_DOWNCAST_BF16=0 makes NeuronX Distributed's flash attention save the softmax's log-sums for its "
            "backward pass in bfloat16, which is inexact; unset it, or use backend.attention=plain"
        )
    return cast(FlashFunction, nki_flash_attn_func)


def flash_attention(function: FlashFunction, lnc: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by NxD's function; repeat key/value heads, since NxD needs one per query head.

    Args:
        function: NxD's flash attention function.
        lnc: Physical cores that share the kernel.
        q: (S, B, N, H).
        k, v: (S, B, K, H).
    """
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 3, 0) for x in (q, k, v))
    if repeats > 1:
        k, v = (repeat_heads(x, repeats) for x in (k, v))
    out = function(
        q,
        k,
        v,
        lnc=lnc,
        softmax_scale=1.0 / math.sqrt(q.shape[2]),
        causal=True,
        mixed_precision=True,  # products in bf16, sums and softmax in float32
        transpose_nki_inputs=True,  # the layout above, which saves the kernel's own transposition
    )
    return out.permute(2, 0, 1, 3)
