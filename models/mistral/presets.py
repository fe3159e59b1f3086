"""Configurations of the published Mistral models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain_models.mistral.config import MistralConfig

_7B = MistralConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=32_768,
)


def _preset(source: str, **changes: object) -> Preset:
    return Preset(MistralConfig(**{**dict(_7B), **changes}), source)


_PAPER = "Jiang et al. 2023 (arXiv:2310.06825) table 1"
_HUB = "config.json of https://huggingface.co/mistralai"
_OPEN = {"rope_theta": 1_000_000.0, "sliding_window": None}

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
        sliding_window=1024,
    ),
    "mistral-7b-v0.1": _preset(f"{_PAPER}; {_HUB}/Mistral-7B-v0.1"),
    "mistral-7b-v0.3": _preset(f"{_HUB}/Mistral-7B-v0.3", vocab_size=32_768, **_OPEN),
    "mistral-nemo-12b": _preset(
        f"{_HUB}/Mistral-Nemo-Base-2407",
        vocab_size=131_072,
        hidden_size=5120,
        num_hidden_layers=40,
        head_dim=128,
        max_position_embeddings=128_000,
        **_OPEN,
    ),
}
