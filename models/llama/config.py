"""Shape of a Llama."""

from __future__ import annotations

from nxtrain_models.decoder.config import DecoderConfig


class LlamaConfig(DecoderConfig):
    """Shape of a Llama, as `LlamaConfig` of transformers."""
