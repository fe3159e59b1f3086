"""Configuration of Llama models."""

from __future__ import annotations

from nxtrain_models.decoder.config import DecoderConfig


class LlamaConfig(DecoderConfig):
    """Configuration of a Llama model, as `LlamaConfig` of transformers."""
