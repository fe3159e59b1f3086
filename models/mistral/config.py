"""Configuration of Mistral models."""

from __future__ import annotations

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import WindowConfig


class MistralConfig(WindowConfig):
    """Configuration of a Mistral model, as `MistralConfig` of transformers."""

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096
    """Sliding window in tokens, including the query's own; None for full causal attention."""
