"""Configuration of Qwen2 models."""

from __future__ import annotations

from typing import ClassVar

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import SwitchedWindowConfig


class Qwen2Config(SwitchedWindowConfig):
    """Configuration of a Qwen2 model, as `Qwen2Config` of transformers."""

    qkv_bias: ClassVar[bool] = True

    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32_768
