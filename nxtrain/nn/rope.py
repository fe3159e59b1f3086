"""Rotary position embedding, with Llama 3's stretching of long wavelengths.

Shapes: S sequence, B batch, N heads, H head dimension.

Source: Su et al. 2021 (arXiv:2104.09864); the frequencies follow transformers' `modeling_rope_utils.py`, in float32
like it, so that imported weights see the same angles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nxtrain.common.kernels import Kernels


@dataclass(frozen=True)
class RopeStretch:
    """Llama 3.1's frequency scaling.

    Args:
        factor: Factor by which long wavelengths are stretched.
        low_freq_factor, high_freq_factor: The band of `original_length / wavelength` over which stretching fades out.
        original_length: Positions of the unstretched training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


def frequencies(head_dim: int, theta: float, scaling: RopeStretch | None) -> Tensor:
    """Angle per position of each pair of dimensions: (H / 2,) float32."""
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim))
    if scaling is None:
        return freqs
    turns = scaling.original_length / (2 * math.pi / freqs)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
    return torch.where(turns < low, freqs / scaling.factor, torch.where(turns > high, freqs, blended))


class Rope(nn.Module):
    """Rotary tables of a model, shared by its layers; float32 for every type of the model.

    Args:
        seq_len: S, the longest sequence.
        head_dim: H.
        theta: Base of the wavelengths.
        scaling: Llama 3's frequency scaling, or None.
        kernels: Kernels of the device.
        positions: (T,) int64, positions of this rank's rows; None: all, in order.

    Attributes:
        positions: The positions on the device; None: all, in order.
    """

    def __init__(
        self,
        seq_len: int,
        head_dim: int,
        theta: float,
        scaling: RopeStretch | None,
        kernels: Kernels,
        positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._kernels, self._host_positions = kernels, positions
        self._seq_len, self._head_dim, self._theta, self._scaling = seq_len, head_dim, theta, scaling
        self.cos: Tensor
        self.sin: Tensor
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq_len, 1, 1, head_dim // 2), persistent=False)
        self.positions: Tensor | None
        self.register_buffer("positions", None, persistent=False)
        if positions is not None:
            self.register_buffer("positions", torch.empty(positions.shape, dtype=positions.dtype), persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Values of the buffers, computed on the host."""
        positions = torch.arange(self._seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies(self._head_dim, self._theta, self._scaling))
        buffers = {"cos": angles.cos()[:, None, None], "sin": angles.sin()[:, None, None]}
        if self._host_positions is not None:
            buffers["positions"] = self._host_positions
        return buffers

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate each pair of dimensions (i, i + H/2) by its position's angle: (S, B, N, H) to the same shape.

        Args:
            x: Queries or keys.
            positions: (S,) or (S, B), positions of the rows; None: those of this rank, or from 0 on.
        """
        length = x.shape[0]
        if positions is None:
            positions = self.positions
        if positions is not None:
            chosen = positions.flatten()
            cos, sin = self.cos.index_select(0, chosen), self.sin.index_select(0, chosen)
            rows = x
            if positions.dim() > 1:
                # Sequence and batch become one dimension, as long as the tables.
                rows = x.flatten(0, 1).unsqueeze(1)
            return self._kernels.rotate(rows, cos, sin).view_as(x)
        if length == self._seq_len:
            # Whole tables are not views: a graph that ends between forward and backward would copy views.
            return self._kernels.rotate(x, self.cos, self.sin)
        return self._kernels.rotate(x, self.cos[:length], self.sin[:length])


def positions_of(starts: Tensor, positions: Tensor | None = None) -> Tensor:
    """Positions inside of the documents, from the first position of each document: (B, S) to (S, B).

    Args:
        starts: First position of each position's document.
        positions: (S,) positions in the whole row; None: from 0 on.
    """
    if positions is None:
        positions = torch.arange(starts.shape[1], device=starts.device)
    return positions[:, None] - starts.t()
