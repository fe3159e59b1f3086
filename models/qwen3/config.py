"""Configuration of Qwen3 models."""

from __future__ import annotations

from typing import ClassVar

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import SwitchedWindowConfig


class Qwen3Config(SwitchedWindowConfig):
    """Configuration of a Qwen3 model, as `Qwen3Config` of transformers."""

    head_norms: ClassVar[bool] = True

    num_key_value_heads: Count | None = 32
    head_dim: Count | None = 128
    max_position_embeddings: Count = 32_768
