"""Configurations of the published Llama models, with their sources."""

from __future__ import annotations

from nxtrain.common.family import Preset
from nxtrain.nn.rope_scaling import Llama3Scaling
from nxtrain_models.llama.config import LlamaConfig

_LLAMA2 = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
)
_LLAMA3 = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_position_embeddings=8192,
)


def _scaling(factor: float) -> Llama3Scaling:
    return Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def _preset(base: LlamaConfig, source: str, **changes: object) -> Preset:
    return Preset(LlamaConfig(**{**dict(base), **changes}), source)


_WIDE = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
_LONG = {"max_position_embeddings": 131_072, "rope_scaling": _scaling(8.0)}
_SMALL = {
    "intermediate_size": 8192,
    "max_position_embeddings": 131_072,
    "rope_scaling": _scaling(32.0),
    "tie_word_embeddings": True,
}

_PAPER2 = "Touvron et al. 2023 (arXiv:2307.09288) table 1 and appendix A.2.1"
_PAPER3 = "Grattafiori et al. 2024 (arXiv:2407.21783) table 3"
_HUB = "config.json of https://huggingface.co/meta-llama"

PRESETS = {
    "tiny": _preset(
        _LLAMA2,
        "nxtrain's own: small enough for any test, with grouped-query attention",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    ),
    "llama2-7b": _preset(_LLAMA2, f"{_PAPER2}; {_HUB}/Llama-2-7b-hf"),
    "llama2-13b": _preset(
        _LLAMA2,
        f"{_PAPER2}; {_HUB}/Llama-2-13b-hf",
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "llama2-70b": _preset(_LLAMA2, f"{_PAPER2}; {_HUB}/Llama-2-70b-hf", **_WIDE, num_key_value_heads=8),
    "llama3-8b": _preset(_LLAMA3, f"{_PAPER3}; {_HUB}/Meta-Llama-3-8B"),
    "llama3-70b": _preset(_LLAMA3, f"{_PAPER3}; {_HUB}/Meta-Llama-3-70B", **_WIDE),
    "llama3.1-8b": _preset(_LLAMA3, f"{_PAPER3}; {_HUB}/Llama-3.1-8B", **_LONG),
    "llama3.1-70b": _preset(_LLAMA3, f"{_PAPER3}; {_HUB}/Llama-3.1-70B", **_WIDE, **_LONG),
    "llama3.3-70b": _preset(_LLAMA3, f"{_HUB}/Llama-3.3-70B-Instruct, config.json", **_WIDE, **_LONG),
    "llama3.1-405b": _preset(
        _LLAMA3,
        f"{_PAPER3}; {_HUB}/Llama-3.1-405B",
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        **_LONG,
    ),
    "llama3.2-1b": _preset(_LLAMA3, f"{_HUB}/Llama-3.2-1B", hidden_size=2048, num_hidden_layers=16, **_SMALL),
    "llama3.2-3b": _preset(
        _LLAMA3,
        f"{_HUB}/Llama-3.2-3B",
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        **_SMALL,
    ),
}
