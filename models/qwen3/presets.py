"""Configurations of the published Qwen3 models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.qwen3.config import Qwen3Config

_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(Qwen3Config(**{**dict(_8B), **changes}), source)


_PAPER = "Qwen Team 2025 (arXiv:2505.09388) table 1; config.json of https://huggingface.co/Qwen"
_SMALL = {"num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True}

PRESETS = {
    "tiny": _preset(
        "nxtrain's own: small enough for any test, with a width of heads apart from the hidden size",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    ),
    "qwen3-0.6b": _preset(f"{_PAPER}/Qwen3-0.6B", hidden_size=1024, intermediate_size=3072, **_SMALL),
    "qwen3-1.7b": _preset(f"{_PAPER}/Qwen3-1.7B", hidden_size=2048, intermediate_size=6144, **_SMALL),
    "qwen3-4b": _preset(f"{_PAPER}/Qwen3-4B", hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3-8b": _preset(f"{_PAPER}/Qwen3-8B"),
    "qwen3-14b": _preset(
        f"{_PAPER}/Qwen3-14B",
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "qwen3-32b": _preset(
        f"{_PAPER}/Qwen3-32B",
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
}
