"""Root mean square (RMS) normalization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxtrain.common.kernels import Kernels
from nxtrain.common.sharding import Init, ShardSpec


class RMSNorm(nn.Module):
    """RMS norm x / rms(x) * weight over the last dimension, computed in float32.

    Args:
        size: Width of the last dimension.
        eps: Epsilon that is added to the mean square.
        kernels: Kernels of the device.
        partial_gradient: Each tensor parallel rank has only a part of the sequence or of the heads, so its gradient is
            a partial sum.
        dtype: Type of the weight.
        decay: Weight decay applies to the weight.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(
        self, size: int, eps: float, *, kernels: Kernels, partial_gradient: bool, dtype: torch.dtype, decay: bool
    ) -> None:
        super().__init__()
        spec = ShardSpec((size,), partial_gradient=partial_gradient, decay=decay, init=Init("ones"))
        self.specs = {"weight": spec}
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self._eps, self._kernels = eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (..., size) to (..., size)."""
        return self._kernels.rms_norm(x, self.weight, self._eps)
