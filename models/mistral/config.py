"""Shape of a Mistral."""

from __future__ import annotations

from nxtrain_models.decoder.config import Count, DecoderConfig


class MistralConfig(DecoderConfig):
    """Shape of a Mistral, as `MistralConfig` of transformers."""

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096
    """Tokens that a query sees, its own among them; None for all before it."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the module computes as the model is defined."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)
