"""Configurations of the published gpt-oss models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.gpt_oss.config import GptOssConfig

_20B = GptOssConfig(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    router_aux_loss_coef=0.9,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(GptOssConfig(**{**dict(_20B), **changes}), source)


_PAPER = "OpenAI 2025 (arXiv:2508.10925) table 1; config.json of https://huggingface.co/openai"

PRESETS = {
    "tiny": _preset(
        "nxtrain's own: small enough for any test",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=16,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt-oss-20b": _preset(f"{_PAPER}/gpt-oss-20b"),
    "gpt-oss-120b": _preset(f"{_PAPER}/gpt-oss-120b", num_hidden_layers=36, num_local_experts=128),
}
