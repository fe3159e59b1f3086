"""Configurations of the published Qwen3 models with experts, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.qwen3_moe.config import Qwen3MoeConfig

_30B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(Qwen3MoeConfig(**{**dict(_30B), **changes}), source)


_PAPER = "Qwen Team 2025 (arXiv:2505.09388) table 2; config.json of https://huggingface.co/Qwen"

PRESETS = {
    "tiny": _preset(
        "nxtrain's own: small enough for any test, with one block of each kind",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=(0,),
    ),
    "qwen3-30b-a3b": _preset(f"{_PAPER}/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": _preset(
        f"{_PAPER}/Qwen3-235B-A22B",
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
}
