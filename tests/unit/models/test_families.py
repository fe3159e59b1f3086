"""Families that share the decoder with Llama: shapes, presets and config.json, against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxtrain.checkpoint.convert.hf import whole_shapes
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.nn.init import draw_shard
from nxtrain_models.decoder.config import DecoderConfig
from tests.support.drawn import FAMILIES
from tests.support.models import hf_tensors, plan
from tests.support.parity import table_of

PUBLISHED = {  # counts of the weights on the Hugging Face hub
    ("mistral", "mistral-7b-v0.1"): 7_241_732_096,
    ("mistral", "mistral-7b-v0.3"): 7_248_023_552,
    ("mistral", "mistral-nemo-12b"): 12_247_782_400,
    ("qwen2", "qwen2.5-0.5b"): 494_032_768,
    ("qwen2", "qwen2.5-1.5b"): 1_543_714_304,
    ("qwen2", "qwen2.5-7b"): 7_615_616_512,
    ("qwen2", "qwen2.5-72b"): 72_706_203_648,
    ("qwen3", "qwen3-0.6b"): 596_049_920,
    ("qwen3", "qwen3-1.7b"): 1_720_574_976,
    ("qwen3", "qwen3-4b"): 4_022_468_096,
    ("qwen3", "qwen3-8b"): 8_190_735_360,
    ("qwen3", "qwen3-14b"): 14_768_307_200,
    ("qwen3", "qwen3-32b"): 32_762_123_264,
    ("mixtral", "mixtral-8x7b"): 46_702_792_704,
    ("mixtral", "mixtral-8x22b"): 140_620_634_112,
    ("qwen3_moe", "qwen3-30b-a3b"): 30_532_122_624,
    ("qwen3_moe", "qwen3-235b-a22b"): 235_093_634_560,
    ("gpt_oss", "gpt-oss-20b"): 20_914_757_184,
    ("gpt_oss", "gpt-oss-120b"): 116_829_156_672,
}
ACTIVE = {  # published with them, in billions
    ("mixtral", "mixtral-8x7b"): 12.9,
    ("mixtral", "mixtral-8x22b"): 39.2,
    ("qwen3_moe", "qwen3-30b-a3b"): 3.35,
    ("qwen3_moe", "qwen3-235b-a22b"): 22.2,
    ("gpt_oss", "gpt-oss-20b"): 3.61 + 201_088 * 2880 / 1e9,  # published without the embedding
    ("gpt_oss", "gpt-oss-120b"): 5.13 + 201_088 * 2880 / 1e9,
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
NEW = (*FAMILIES[1:], *MIXTURES)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}


def preset_of(family: str, preset: str) -> DecoderConfig:
    config = find_family(family).preset(preset)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(("family", "preset"), PUBLISHED)
def test_a_preset_has_the_published_parameters_under_the_names_of_transformers(family: str, preset: str) -> None:
    actual, config = find_family(family), preset_of(family, preset)
    theirs = transformers.CONFIG_MAPPING[family].from_dict(actual.to_hf(config, "bfloat16"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    theirs_by_name = hf_tensors(actual.dimensions(config), model.named_parameters())
    assert whole_shapes(actual, config) == {name: tuple(p.shape) for name, p in theirs_by_name.items()}
    assert (
        actual.dimensions(config).num_params == PUBLISHED[family, preset] == sum(p.numel() for p in model.parameters())
    )


def test_every_preset_is_counted_and_says_where_it_was_published() -> None:
    presets = {
        (name, preset): find_family(name).presets[preset] for name in NEW for preset in find_family(name).presets
    }
    assert {(family, name) for family, name in presets if name != "tiny"} == PUBLISHED.keys()
    for (family, name), preset in presets.items():
        assert preset.source, name
        assert find_family(family).check(preset.config, tp=1, seq_len=128) == [], name


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_keys_that_a_file_lacks_have_the_values_of_transformers(family: str) -> None:
    actual = find_family(family)
    theirs = transformers.CONFIG_MAPPING[family].from_dict({"model_type": family, **SIZES})
    ours = actual.from_hf({"model_type": family, **SIZES})
    again = actual.from_hf(theirs.to_dict())
    assert isinstance(ours, DecoderConfig)
    assert ours == again
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_size == (getattr(theirs, "head_dim", None) or 64 // 32)


@pytest.mark.parametrize(("family", "preset"), [*PUBLISHED, *((family, "tiny") for family in NEW)])
def test_transformers_reads_what_is_written_and_its_own_form_is_read_back(
    family: str, preset: str, tmp_path: Path
) -> None:
    actual, config = find_family(family), preset_of(family, preset)
    written = actual.to_hf(config, "bfloat16")
    assert actual.from_hf(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [type(transformers.AutoModelForCausalLM.from_config(tiny(theirs))).__name__]
    theirs.save_pretrained(tmp_path / "again")
    assert actual.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config


def tiny(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The smallest configuration of the same family."""
    return transformers.CONFIG_MAPPING[config.model_type].from_dict({**SIZES, "head_dim": 2, "num_key_value_heads": 1})


QWEN = {**SIZES, "num_key_value_heads": 4, "sliding_window": 4096, "max_window_layers": 2, "use_sliding_window": False}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used_is_no_window(family: str) -> None:
    result = find_family(family)
    config = result.from_hf({"model_type": family, **QWEN, "layer_types": ["full_attention"] * 2})
    assert result.check(config, tp=1, seq_len=8192) == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_in_use_is_written_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    actual, used = find_family(family), {**QWEN, "model_type": family, "use_sliding_window": True, "sliding_window": 64}
    config = actual.from_hf({**used, "max_window_layers": 1})
    assert [config.window_of(layer) for layer in range(2)] == [None, 64]  # type: ignore[attr-defined]
    theirs = transformers.CONFIG_MAPPING[family].from_dict(actual.to_hf(config, "float32"))
    assert (theirs.sliding_window, theirs.layer_types) == (64, ["full_attention", "sliding_attention"])
    theirs.save_pretrained(tmp_path)
    assert actual.from_hf(json.loads((tmp_path / "config.json").read_text())) == config
    no_layer = actual.from_hf({**used, "max_window_layers": 2})
    assert no_layer.window_of(1) is None  # type: ignore[attr-defined]
    assert actual.to_hf(no_layer, "float32")["use_sliding_window"] is False


@pytest.mark.parametrize(
    ("family", "change", "key", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias", "True is not supported; only False is"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
            "layer 1 is 'sliding_attention', but the other keys of the file make it 'full_attention'",
        ),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported; only 'silu' is"),
        ("qwen3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type", "type 'longrope'"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(
    family: str, change: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_family(family).from_hf({"model_type": family, **QWEN, **change})
    (problem,) = caught.value.problems
    assert (problem.key, problem.origin) == (key, "config.json")
    assert message in problem.reason


def test_a_sequence_may_be_longer_than_the_window() -> None:
    mistral = find_family("mistral")
    config = mistral.preset("mistral-7b-v0.1")
    assert config.window_of(31) == 4096  # type: ignore[attr-defined]
    assert mistral.check(config, tp=1, seq_len=8192) == []
    assert config.longest_sequence == ("max_position_embeddings", 32_768)


def test_biases_and_norms_of_heads_start_as_zeros_and_ones() -> None:
    for family, parts in (("qwen2", {"q_proj.bias": 0.0}), ("qwen3", {"q_norm.weight": 1.0, "k_norm.weight": 1.0})):
        table = table_of(plan("gqa", model={"family": family, "fused_qkv": False}), Mesh(1, 0))
        for leaf, value in parts.items():
            name = f"model.layers.0.self_attn.{leaf}"
            local = torch.full(table[name].shape, 9.0)
            draw_shard(local, name, table[name], Mesh(1, 0).tp, seed=0)
            assert torch.equal(local, torch.full_like(local, value))


@pytest.mark.parametrize(("family", "preset"), ACTIVE)
def test_a_token_passes_through_the_published_number_of_parameters(family: str, preset: str) -> None:
    dimensions, config = find_family(family).dimensions(preset_of(family, preset)), preset_of(family, preset)
    assert dimensions.num_active_params / 1e9 == pytest.approx(ACTIVE[family, preset], rel=0.01)
    matrices = dimensions.num_active_params - (2 * config.num_hidden_layers + 1) * config.hidden_size
    if config.head_norms:
        matrices -= 2 * config.num_hidden_layers * config.head_size
    matrices -= config.vocab_size * config.hidden_size  # a lookup costs nothing
    mixture = dimensions.mixture
    if mixture is not None and mixture.biases:
        of_heads = (
            config.num_attention_heads + 2 * config.num_kv_heads
        ) * config.head_size + config.num_attention_heads
        of_experts = mixture.experts_per_token * (2 * mixture.expert_size + config.hidden_size)
        biases = of_heads + config.hidden_size + mixture.num_experts + of_experts
        matrices -= config.num_hidden_layers * biases
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_size
    assert dimensions.flops_per_token(100) == 6 * matrices + 6 * 100 * scores


def test_blocks_without_experts_are_counted_as_transformers_builds_them() -> None:
    shape = {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": (3,), "num_experts": 3}
    actual = find_family("qwen3_moe")
    config = preset_of("qwen3_moe", "tiny").model_copy(update=shape)
    assert config.dense_layers == (0, 2, 3, 4, 6)
    theirs = transformers.CONFIG_MAPPING["qwen3_moe"].from_dict(actual.to_hf(config, "bfloat16"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    by_name = hf_tensors(actual.dimensions(config), model.named_parameters())
    assert whole_shapes(actual, config) == {name: tuple(p.shape) for name, p in by_name.items()}
    assert actual.dimensions(config).num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok=9 exceeds the 8 experts of a block; use 8",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0, 1], "num_experts": 8}, "no block has experts: mlp_only_layers=[0, 1]"),
    ],
)
def test_experts_that_cannot_be_are_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_family(family).from_hf({"model_type": family, **SIZES, **change})


def test_a_window_of_qwen3_with_experts_is_one_in_use(tmp_path: Path) -> None:
    actual = find_family("qwen3_moe")
    config = actual.from_hf({"model_type": "qwen3_moe", **SIZES, "use_sliding_window": True, "sliding_window": 64})
    assert config.window_of(0) == 64  # type: ignore[attr-defined]
    theirs = transformers.CONFIG_MAPPING["qwen3_moe"].from_dict(actual.to_hf(config, "float32"))
    assert theirs.sliding_window == 64
    assert actual.from_hf({**theirs.to_dict()}) == config
    unused = actual.from_hf({"model_type": "qwen3_moe", **SIZES, "sliding_window": 64})
    assert unused.window_of(0) is None  # type: ignore[attr-defined]
