"""Scaling methods of the rotary embedding, for longer sequences than in the original training.

Each class is a `rope_type` of transformers, with the names, meanings and defaults of `rope_parameters` there. The
frequencies are computed in `nxtrain.nn.rope`. This module works without torch, so that a configuration can be checked
on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Factor = Annotated[float, Field(ge=1, le=3.4e38)]  # these values are combined with float32 numbers
_Positive = Annotated[float, Field(gt=0, le=3.4e38)]
_NotNegative = Annotated[float, Field(ge=0, le=3.4e38)]
_Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LinearScaling(BaseModel):
    """Linear scaling (position interpolation): every position is divided by the factor.

    Source: Chen et al. 2023 (arXiv:2306.15595) section 2.3, equation 4.
    """

    model_config = _STRICT

    rope_type: Literal["linear"] = "linear"
    factor: _Factor
    """Factor by which all wavelengths grow."""

    def longest(self, max_position_embeddings: int) -> int:
        """Maximum sequence length of a model whose original length is `max_position_embeddings`."""
        return int(max_position_embeddings * self.factor)


class DynamicScaling(BaseModel):
    """Dynamic NTK scaling: the base of the wavelengths grows with the sequence length, beyond the original length.

    Source: Peng et al. 2023 (arXiv:2309.00071) sections 3.1 and 3.3.
    """

    model_config = _STRICT

    rope_type: Literal["dynamic"] = "dynamic"
    factor: _Factor
    """Scaling factor of transformers' dynamic NTK formula, which sets the growth of the base with the length."""

    def longest(self, max_position_embeddings: int) -> int:
        """Maximum sequence length of a model whose original length is `max_position_embeddings`."""
        return int(max_position_embeddings * self.factor)


class YarnScaling(BaseModel):
    """YaRN scaling: long wavelengths grow by the factor, short ones are kept, and attention gets a temperature.

    Source: Peng et al. 2023 (arXiv:2309.00071) sections 3.2 and 3.4.
    """

    model_config = _STRICT

    rope_type: Literal["yarn"] = "yarn"
    factor: _Factor
    """Factor by which long wavelengths grow."""
    original_max_position_embeddings: _Count
    """Maximum sequence length of the original training."""
    attention_factor: _Positive | None = None
    """Factor of cosines and sines; None to compute it from `factor`, `mscale` and `mscale_all_dim`."""
    beta_fast: _Positive | None = None
    """Dimensions with at least this many rotations in the original length are not scaled; None for 32."""
    beta_slow: _Positive | None = None
    """Dimensions with at most this many rotations in the original length are fully scaled; None for 1."""
    mscale: _NotNegative | None = None
    """Weight of log(factor) in the numerator of the attention factor; None or 0 for no ratio."""
    mscale_all_dim: _NotNegative | None = None
    """Weight of log(factor) in the denominator of the attention factor; None or 0 for no ratio."""
    truncate: bool = True
    """Round the bounds of the partly scaled dimensions outwards to whole dimensions."""

    @property
    def fast_turns(self) -> float:
        """Value of `beta_fast`, or its default."""
        return self.beta_fast or 32.0

    @property
    def slow_turns(self) -> float:
        """Value of `beta_slow`, or its default."""
        return self.beta_slow or 1.0

    @property
    def attention_scaling(self) -> float:
        """Factor of cosines and sines, which acts as the attention temperature.

        Source: Peng et al. 2023, section 3.4; the ratio is as in DeepSeek-V2's `modeling_deepseek.py`.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        log_factor = math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log_factor + 1.0) / (0.1 * self.mscale_all_dim * log_factor + 1.0)
        return 0.1 * log_factor + 1.0

    def longest(self, max_position_embeddings: int) -> int:
        """Maximum sequence length. Published models keep the original `max_position_embeddings`, or raise it."""
        return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))

    @model_validator(mode="after")
    def _ordered(self) -> YarnScaling:
        if self.fast_turns < self.slow_turns:
            raise ValueError(f"beta_fast={self.fast_turns} must not be less than beta_slow={self.slow_turns}")
        return self


class Llama3Scaling(BaseModel):
    """Llama 3.1 scaling: long wavelengths grow by the factor, short ones are kept, and medium ones grow less.

    Source: `apply_scaling` in Meta's `llama_models`, `models/llama3/reference_impl/model.py`.
    """

    model_config = _STRICT

    # Neither written nor needed in a table: checkpoints and configurations from before the other types have none.
    rope_type: Literal["llama3"] = Field(default="llama3", exclude=True)
    factor: _Factor
    """Factor by which wavelengths far beyond the original context grow."""
    low_freq_factor: _Positive
    """Wavelengths longer than the original context divided by this value are fully scaled."""
    high_freq_factor: _Positive
    """Wavelengths shorter than the original context divided by this value are not scaled."""
    original_max_position_embeddings: _Count
    """Maximum sequence length of the original training, in tokens."""

    def longest(self, max_position_embeddings: int) -> int:
        """Maximum sequence length. Published models have the extended length as `max_position_embeddings`."""
        if max_position_embeddings > self.original_max_position_embeddings:
            return max_position_embeddings
        return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Scaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}"
            )
        return self


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling

SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}
"""Scaling classes by `rope_type`."""


class _TypeOnly(BaseModel):
    """Schema of the key that all scaling tables share, `rope_type`."""

    model_config = ConfigDict(strict=True)

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]


def read_scaling(table: object) -> RopeScaling:
    """Parse a rope scaling table by its `rope_type`.

    Raises:
        ValidationError: The table is invalid; locations in the error are keys of the table.
    """
    if isinstance(table, Mapping) and "low_freq_factor" in table:
        table = {"rope_type": "llama3", **table}
    rope_type = _TypeOnly.model_validate(table).rope_type
    return SCALINGS[rope_type].model_validate(table)
