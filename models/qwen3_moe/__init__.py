"""Model family Qwen3 MoE: Qwen3 with experts.

Source: Qwen Team 2025 (arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nxtrain.common.family import ModelConfig
from nxtrain_models.decoder import DecoderFamily
from nxtrain_models.decoder.config import DecoderConfig
from nxtrain_models.qwen3_moe.config import Qwen3MoeConfig
from nxtrain_models.qwen3_moe.presets import PRESETS


class Qwen3Moe(DecoderFamily):
    """Model family Qwen3 MoE, whose blocks have experts, except its dense layers."""

    name = "qwen3_moe"
    config_type = Qwen3MoeConfig
    presets = PRESETS
    architecture = "Qwen3MoeForCausalLM"
    fixed: ClassVar[Mapping[str, object]] = {"attention_bias": False}

    def from_hf(self, hf_config: Mapping[str, Any]) -> DecoderConfig:
        """Convert a Hugging Face `config.json`, in which transformers 5 names the number of experts differently."""
        window = None
        if hf_config.get("use_sliding_window", False):
            window = hf_config.get("sliding_window", 4096)
        values = {**hf_config, "sliding_window": window, "mlp_only_layers": hf_config.get("mlp_only_layers") or ()}
        if "num_local_experts" in hf_config:
            values.setdefault("num_experts", hf_config["num_local_experts"])
        return super().from_hf(values)

    def to_hf(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Convert a configuration to a Hugging Face `config.json`, with `use_sliding_window`."""
        written = super().to_hf(config, dtype)
        in_use = written["sliding_window"] is not None
        return {**written, "use_sliding_window": in_use, "mlp_only_layers": list(written["mlp_only_layers"])}


FAMILY = Qwen3Moe()
