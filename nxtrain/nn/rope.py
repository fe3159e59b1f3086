"""Rotary position embedding, with the scalings of `nxtrain.nn.rope_scaling`.

Shapes: S sequence, B batch, N heads, H head dimension.

Source: Su et al. 2021 (arXiv:2104.09864); the frequencies follow transformers' `modeling_rope_utils.py` in float32, so
that imported weights get the same angles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nxtrain.common.kernels import Kernels
from nxtrain.nn.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


def frequencies(head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies without scaling: angle per position of each pair of dimensions, (H / 2,) float32."""
    return 1.0 / _wavelengths(head_dim, theta)


def linear_frequencies(scaling: LinearScaling, head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies of linear scaling, divided by the factor.

    Source: Chen et al. 2023 (arXiv:2306.15595) section 2.3, equation 4.
    """
    return frequencies(head_dim, theta) / scaling.factor


def dynamic_frequencies(
    scaling: DynamicScaling, head_dim: int, theta: float, seq_len: int, original_length: int
) -> Tensor:
    """Rotary frequencies of dynamic NTK scaling: the base grows with the sequence length beyond the original length.

    Source: Peng et al. 2023 (arXiv:2309.00071) section 3.1, definition 1, and section 3.3.

    Args:
        seq_len: Sequence length for which the frequencies are computed.
    """
    if seq_len > original_length:
        # In float32, as transformers computes with the length of its input.
        length = torch.tensor(seq_len, device="cpu")
        growth = scaling.factor * length / original_length - (scaling.factor - 1)
        theta = float(theta * growth ** (head_dim / (head_dim - 2)))
    return frequencies(head_dim, theta)


def yarn_frequencies(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies of YaRN: low frequencies are divided by the factor, and high frequencies are kept.

    Source: Peng et al. 2023 (arXiv:2309.00071) section 3.2, "NTK-by-parts". The bounds follow the authors'
    `find_correction_range`, in dimensions instead of wavelengths.
    """

    def dimension_with(turns: float) -> float:
        """Index of the pair of dimensions with a given number of rotations within the original length."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return (head_dim * math.log(wavelength)) / (2 * math.log(theta))

    low, high = dimension_with(scaling.fast_turns), dimension_with(scaling.slow_turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    wavelengths = _wavelengths(head_dim, theta)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    unscaled_share = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    scaled, unscaled = 1.0 / (scaling.factor * wavelengths), 1.0 / wavelengths
    return scaled * (1 - unscaled_share) + unscaled * unscaled_share


def llama3_frequencies(scaling: Llama3Scaling, head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies of Llama 3.1: low frequencies are divided by the factor, medium frequencies partly.

    Source: `apply_scaling` in Meta's `llama_models`, `models/llama3/reference_impl/model.py`.
    """
    freqs = frequencies(head_dim, theta)
    turns = scaling.original_max_position_embeddings / (2 * math.pi / freqs)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
    return torch.where(turns < low, freqs / scaling.factor, torch.where(turns > high, freqs, blended))


def _wavelengths(head_dim: int, theta: float) -> Tensor:
    """Wavelengths divided by 2 pi, in positions per radian, of each pair of dimensions: (H / 2,) float32."""
    dimensions = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float()
    wavelengths: Tensor = theta ** (dimensions / head_dim)
    return wavelengths


class Rope(nn.Module):
    """Rotary position embedding with cosine and sine tables, shared by all layers; float32 for every model type.

    Args:
        seq_len: Maximum sequence length S.
        head_dim: Head dimension H.
        theta: Base of the wavelengths.
        scaling: Scaling of the frequencies, or None.
        kernels: Kernels of the device.
        original_length: Maximum sequence length of the original training, for dynamic scaling.
        positions: (T,) int64, sequence positions of this rank; None for all, in order.

    Attributes:
        positions: Sequence positions of this rank on the device; None for all, in order.
    """

    def __init__(
        self,
        seq_len: int,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        kernels: Kernels,
        original_length: int = 0,
        positions: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._kernels, self._host_positions = kernels, positions
        self._seq_len = seq_len
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._original_length = original_length
        self.cos: Tensor
        self.sin: Tensor
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq_len, 1, 1, head_dim // 2), persistent=False)
        self.positions: Tensor | None
        self.register_buffer("positions", None, persistent=False)
        if positions is not None:
            self.register_buffer("positions", torch.empty(positions.shape, dtype=positions.dtype), persistent=False)

    def host_buffers(self) -> dict[str, Tensor]:
        """Cosine and sine tables, computed on the host."""
        positions = torch.arange(self._seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self._frequencies())
        factor = 1.0
        if isinstance(self._scaling, YarnScaling):
            factor = self._scaling.attention_scaling
        buffers = {"cos": angles.cos()[:, None, None] * factor, "sin": angles.sin()[:, None, None] * factor}
        if self._host_positions is not None:
            buffers["positions"] = self._host_positions
        return buffers

    def _frequencies(self) -> Tensor:
        scaling = self._scaling
        head_dim = self._head_dim
        theta = self._theta
        if isinstance(scaling, LinearScaling):
            return linear_frequencies(scaling, head_dim, theta)
        if isinstance(scaling, DynamicScaling):
            return dynamic_frequencies(scaling, head_dim, theta, self._seq_len, self._original_length)
        if isinstance(scaling, YarnScaling):
            return yarn_frequencies(scaling, head_dim, theta)
        if isinstance(scaling, Llama3Scaling):
            return llama3_frequencies(scaling, head_dim, theta)
        return frequencies(head_dim, theta)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate each pair of dimensions (i, i + H/2) by the angle of its position: (S, B, N, H) to the same shape.

        Args:
            x: Queries or keys.
            positions: (S,) or (S, B) positions; None for the positions of this rank, or from 0 on.
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
    """Positions relative to the beginning of each document, for packed documents: (B, S) to (S, B).

    Args:
        starts: First position of each position's document.
        positions: (S,) positions in the whole row; None for positions from 0 on.
    """
    if positions is None:
        positions = torch.arange(starts.shape[1], device=starts.device)
    return positions[:, None] - starts.t()
