"""Shape of a Mistral."""

from __future__ import annotations

from nxtrain_models.decoder.config import Count
from nxtrain_models.decoder.window import WindowConfig


class MistralConfig(WindowConfig):
    """Shape of a Mistral, as `MistralConfig` of transformers."""

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096
    """Tokens that a query sees, its own among them; None for all before it."""
