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
    def longest_sequence(self) -> tuple[str, int]:
        """Key that limits the tokens of a sequence, and the number; within the window, attention is plainly causal."""
        window = self.sliding_window
        if window is not None and window < self.max_position_embeddings:
            return "sliding_window", window
        return super().longest_sequence
