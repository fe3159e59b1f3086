"""Model family gpt-oss: experts with biases and clamped activations, attention sinks, and alternating windows.

Source: OpenAI 2025 (arXiv:2508.10925).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from nxtrain.common.family import ModelConfig
from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.decoder.config import DecoderConfig
from nxtrain_models.decoder.hf import layer_types
from nxtrain_models.gpt_oss.config import YARN, GptOssConfig
from nxtrain_models.gpt_oss.presets import PRESETS


class GptOss(DecoderFamily):
    """Model family gpt-oss, whose weight files stack the matrices of all experts of a block."""

    name = "gpt_oss"
    config_type = GptOssConfig
    presets = PRESETS
    architecture = "GptOssForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {"attention_bias": True}

    def from_hf(self, hf_config: Mapping[str, Any]) -> DecoderConfig:
        """Convert a Hugging Face `config.json`, whose layers must alternate between windows and full attention."""
        values = {"num_key_value_heads": 8, **hf_config}
        if not (values.get("rope_scaling") or values.get("rope_parameters")):
            values["rope_scaling"] = {**YARN, "rope_theta": hf_config.get("rope_theta", 150_000.0)}
        values.setdefault("sliding_window", 128)
        return super().from_hf(values)

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Convert a configuration to a Hugging Face `config.json`, with `layer_types`."""
        return {**super().to_hf(config, dtype), "layer_types": layer_types(cast(DecoderConfig, config))}


FAMILY = GptOss()
