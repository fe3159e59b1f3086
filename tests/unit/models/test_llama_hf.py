"""config.json in and out, against what transformers itself reads and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxtrain.common.errors import ConfigError
from nxtrain_models.llama import FAMILY

LEGACY = {  # meta-llama/Llama-3.2-1B, written by transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def test_a_published_config_is_its_preset() -> None:
    assert FAMILY.from_hf(LEGACY) == FAMILY.preset("llama3.2-1b")


@pytest.mark.parametrize("name", FAMILY.presets)
def test_what_is_written_is_read_back(name: str) -> None:
    config = FAMILY.preset(name)
    assert FAMILY.from_hf(FAMILY.to_hf(config, "bfloat16")) == config


@pytest.mark.parametrize("name", FAMILY.presets)
def test_transformers_reads_what_is_written_and_its_own_form_is_read_back(name: str, tmp_path: Path) -> None:
    config = FAMILY.preset(name)
    (tmp_path / "config.json").write_text(json.dumps(FAMILY.to_hf(config, "bfloat16")))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, transformers.LlamaConfig)
    # transformers before 4.56 parses torch_dtype, and keeps the text of dtype.
    parsed = theirs.dtype if isinstance(theirs.dtype, torch.dtype) else theirs.torch_dtype
    assert parsed == torch.bfloat16
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert FAMILY.from_hf(again) == config


def test_transformers_4_finds_its_keys() -> None:
    written = FAMILY.to_hf(FAMILY.preset("llama3.2-1b"), "bfloat16")
    ours = {key: written[key] for key in LEGACY if key in written}
    assert ours == {key: LEGACY[key] for key in ours}
    assert ours.keys() >= {"architectures", "rope_theta", "rope_scaling", "torch_dtype", "tie_word_embeddings"}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_theta": 20000.0, "rope_scaling": None},
        {"rope_theta": 20000.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_every_spelling_of_plain_rotary_embeddings_is_read(rope: dict[str, Any]) -> None:
    rest = {key: value for key, value in LEGACY.items() if not key.startswith("rope_")}
    config = FAMILY.from_hf({**rest, **rope})
    assert (config.rope_theta, config.rope_scaling) == (20000.0, None)


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"attention_bias": True}, "attention_bias", "True is not supported; only False is"),
        ({"mlp_bias": True}, "mlp_bias", "True is not supported; only False is"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported; only 'silu' is"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling.rope_type", "type 'su'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type", "type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor", "required"),
        ({"hidden_size": "big"}, "hidden_size", "integer"),
        ({"num_key_value_heads": 5}, "", "num_key_value_heads=5 does not divide num_attention_heads=32"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(change: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.from_hf({**LEGACY, **change})
    first = caught.value.problems[0]
    assert (first.key, first.origin) == (key, "config.json")
    assert message in first.reason


def test_every_unsupported_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.from_hf({**LEGACY, "attention_bias": True, "mlp_bias": True, "vocab_size": -1})
    assert [problem.key for problem in caught.value.problems] == ["attention_bias", "mlp_bias", "vocab_size"]


def test_a_width_of_heads_that_does_not_follow_from_the_other_sizes_is_kept() -> None:
    config = FAMILY.from_hf({**LEGACY, "head_dim": 128})
    assert config.head_dim == 128
    assert FAMILY.from_hf(FAMILY.to_hf(config, "bfloat16")) == config


def test_training_degrees_of_the_exporter_do_not_matter() -> None:
    assert FAMILY.from_hf({**LEGACY, "pretraining_tp": 4}) == FAMILY.from_hf(LEGACY)


def test_another_architecture_is_refused_by_name() -> None:
    """Its biases or windows would be lost in silence."""
    with pytest.raises(ConfigError, match="qwen2"):
        FAMILY.from_hf({**FAMILY.to_hf(FAMILY.preset("tiny"), "float32"), "model_type": "qwen2"})
