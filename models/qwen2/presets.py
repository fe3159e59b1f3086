"""Configurations of the published Qwen2.5 models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.qwen2.config import Qwen2Config

_7B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=131_072,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(Qwen2Config(**{**dict(_7B), **changes}), source)


_SMALL = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True}
_PAPER = "Qwen Team 2024 (arXiv:2412.15115) table 1; config.json of https://huggingface.co/Qwen"

PRESETS = {
    "tiny": _preset(
        "nxtrain's own: small enough for any test",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    ),
    "qwen2.5-0.5b": _preset(
        f"{_PAPER}/Qwen2.5-0.5B",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        max_position_embeddings=32_768,
        **_SMALL,
    ),
    "qwen2.5-1.5b": _preset(
        f"{_PAPER}/Qwen2.5-1.5B",
        hidden_size=1536,
        intermediate_size=8960,
        num_attention_heads=12,
        **_SMALL,
    ),
    "qwen2.5-7b": _preset(f"{_PAPER}/Qwen2.5-7B"),
    "qwen2.5-72b": _preset(
        f"{_PAPER}/Qwen2.5-72B",
        hidden_size=8192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
    ),
}
