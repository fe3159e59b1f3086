"""Configurations of the published Mixtral models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.mixtral.config import MixtralConfig

_8X7B = MixtralConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    max_position_embeddings=32_768,
    num_local_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.02,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(MixtralConfig(**{**dict(_8X7B), **changes}), source)


_HUB = "config.json of https://huggingface.co/mistralai"

PRESETS = {
    "tiny": _preset(
        "nxtrain's own: small enough for any test, with a width of heads apart from the hidden size",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        num_local_experts=4,
    ),
    "mixtral-8x7b": _preset(f"Jiang et al. 2024 (arXiv:2401.04088) table 1; {_HUB}/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": _preset(
        f"{_HUB}/Mixtral-8x22B-v0.1",
        hidden_size=6144,
        intermediate_size=16_384,
        num_hidden_layers=56,
        num_attention_heads=48,
        max_position_embeddings=65_536,
        router_aux_loss_coef=0.001,
    ),
}
