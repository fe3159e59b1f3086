"""Shapes: the published ones, the impossible ones, and the arithmetic on them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from nxtrain.common.errors import ConfigError
from nxtrain.nn.rope_scaling import Llama3Scaling
from nxtrain_models.llama import FAMILY
from nxtrain_models.llama.config import LlamaConfig

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("preset", "published"),  # counts of the weights on the Hugging Face hub
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, published: int) -> None:
    config = FAMILY.preset(preset)
    assert isinstance(config, LlamaConfig)
    assert FAMILY.dimensions(config).num_params == published


@pytest.mark.parametrize(
    ("preset", "positions", "theta", "factor", "tied"),
    [
        ("llama2-70b", 4096, 1e4, None, False),
        ("llama3-70b", 8192, 5e5, None, False),
        ("llama3.1-405b", 131_072, 5e5, 8.0, False),
        ("llama3.2-3b", 131_072, 5e5, 32.0, True),
    ],
)
def test_presets_have_the_published_positions(
    preset: str, positions: int, theta: float, factor: float | None, tied: bool
) -> None:
    config = FAMILY.preset(preset)
    assert isinstance(config, LlamaConfig)
    scaling = config.rope_scaling
    assert (config.max_position_embeddings, config.rope_theta, config.tie_word_embeddings) == (positions, theta, tied)
    assert (scaling and scaling.factor) == factor
    assert config.rms_norm_eps == 1e-5
    if scaling:
        assert isinstance(scaling, Llama3Scaling)
        assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
        assert scaling.original_max_position_embeddings == 8192


def test_every_preset_says_where_it_was_published_and_runs_alone() -> None:
    for name, preset in FAMILY.presets.items():
        assert preset.source, name
        assert FAMILY.check(preset.config, tp=1, seq_len=128) == [], name


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'llama4' is not a preset of llama(?s:.*)known: tiny, llama2-7b"):
        FAMILY.preset("llama4")


def test_key_value_heads_and_head_width_have_hugging_face_defaults() -> None:
    config = LlamaConfig.model_validate(SIZES)
    assert (config.num_kv_heads, config.head_size) == (4, 16)
    assert (config.num_key_value_heads, config.head_dim) == (None, None), "or overrides would clash"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4; use 1, 2, 4"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=64; set head_dim"),
        ({"head_dim": 15}, "heads of width 15 cannot be rotated in pairs"),
        ({"hidden_size": 0}, "greater than 0"),
        ({"hidden_sise": 64}, "Extra inputs are not permitted"),
        ({"vocab_size": "512"}, "valid integer"),
        (
            {
                "rope_scaling": {
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor=4.0 must exceed low_freq_factor=4.0",
        ),
    ],
)
def test_an_impossible_shape_is_refused_with_its_reason(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LlamaConfig.model_validate({**SIZES, **change})


def problems(tp: int, seq_len: int = 128, **changes: object) -> list[tuple[str, str, str]]:
    config = LlamaConfig.model_validate({**SIZES, "num_attention_heads": 24, "hidden_size": 192, **changes})
    return [(p.key, p.reason, p.hint) for p in FAMILY.check(config, tp=tp, seq_len=seq_len)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 24])
def test_tp_that_divides_the_heads_and_fits_the_key_value_heads_is_fine(tp: int) -> None:
    assert problems(tp, num_key_value_heads=8) == []


@pytest.mark.parametrize(
    ("tp", "reason"),
    [
        (5, "tp=5 does not divide model.config.num_attention_heads=24"),
        (12, "neither of tp=12 and model.config.num_key_value_heads=8 divides the other"),
    ],
)
def test_tp_that_cannot_work_is_refused_with_those_that_can(tp: int, reason: str) -> None:
    assert problems(tp, num_key_value_heads=8) == [("parallel.tp", reason, "use 1, 2, 4, 8, 24")]


def test_vocabulary_and_mlp_need_not_divide() -> None:
    assert problems(8, num_key_value_heads=8, vocab_size=131, intermediate_size=89) == []


def test_every_problem_is_reported_at_once() -> None:
    result = problems(7, seq_len=4096)
    assert [key for key, _, _ in result] == ["parallel.tp", "train.seq_len"]


def test_flops_per_token_are_those_counted_by_hand() -> None:
    config = LlamaConfig.model_validate({**SIZES, "num_key_value_heads": 2})
    matrices = 2 * (64 * 64 + 64 * 32 + 64 * 32 + 64 * 64 + 3 * 64 * 192) + 512 * 64  # q k v o, mlp, two layers; head
    scores = 2 * (2 * 128 * 64) // 2  # q k and p v over 128 positions, half of them masked, two layers
    assert FAMILY.dimensions(config).flops_per_token(128) == 6 * matrices + 6 * scores


def test_tying_changes_the_parameters_and_not_the_flops() -> None:
    apart, tied = LlamaConfig.model_validate(SIZES), LlamaConfig.model_validate({**SIZES, "tie_word_embeddings": True})
    assert FAMILY.dimensions(apart).num_params - FAMILY.dimensions(tied).num_params == 512 * 64
    assert FAMILY.dimensions(apart).flops_per_token(128) == FAMILY.dimensions(tied).flops_per_token(128)


def test_the_family_is_known_without_torch() -> None:
    code = "import sys, nxtrain_models.llama; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
