"""Attention by NKI's flash kernel, through NeuronX Distributed's function.

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
    """`nki_flash_attn_func` of NxD 0.16 to 0.18, with the arguments that nxtrain passes."""

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
        """Three tensors (B, N, H, S) to (B, N, S, H), unlike the shape in the function's docstring."""
        ...


def load() -> FlashFunction:
    """Import NxD's function.

    Raises:
        BackendError: The function cannot be imported, or an environment variable would make it inexact.
    """
    try:
        from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
    except ImportError as error:
        raise BackendError(
            f"neuronx-distributed is installed, but its flash attention cannot be imported: {error}; use "
            "backend.attention=plain, or install packages of one release of the Neuron SDK"
        ) from error
    if "XLA_DOWNCAST_BF16" in os.environ:
        # Other values are refused before. For torch-xla, `0` means off, like an unset variable, but not for NxD.
        raise BackendError(
            "XLA_DOWNCAST_BF16=0 makes NeuronX Distributed's flash attention keep the logarithms of the softmax's "
            "sums, from which its backward pass starts, in bfloat16; unset it, or use backend.attention=plain"
        )
    return cast(FlashFunction, nki_flash_attn_func)


def flash_attention(function: FlashFunction, lnc: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Kernels.attention` by a function that needs as many key/value heads as query heads.

    Args:
        function: NxD's function.
        lnc: Physical cores that share the kernel's work.
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
