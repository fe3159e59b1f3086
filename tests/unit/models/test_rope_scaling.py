"""Models whose rotary embedding is scaled: parity with transformers, lengths, files of Hugging Face, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pydantic import ValidationError
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.nn.rope_scaling import YarnScaling
from nxtrain_models.decoder.config import DecoderConfig
from tests.support.drawn import FAMILIES
from tests.support.models import SCALING_TYPES, draw_scaling, hf_model, our_model, plan, tokens, weights_of

TOLERANCE = 1e-5


def drawn_plan(family: str, rope_type: str, seed: int) -> Resolved:
    rng = Random(f"{family} {rope_type} {seed}")
    seq_len = rng.randint(12, 80)
    heads = rng.choice((2, 4, 6))
    config = {
        **draw_scaling(rope_type, rng, seq_len),
        "hidden_size": heads * rng.randint(8, 16),
        "num_attention_heads": heads,
        "head_dim": 2 * rng.randint(4, 16),
        "rope_theta": rng.choice((100.0, 10_000.0, 500_000.0)),
    }
    split = {"fused_qkv": False, "fused_gate_up": False}
    return plan("gqa2", model={"family": family, "config": config, **split}, train={"seq_len": seq_len})


def relative_errors(resolved: Resolved, ours: Resolved | None = None) -> tuple[float, float, float]:
    """Largest errors of the logits, the loss and the gradients, each relative to the largest entry of transformers.

    Args:
        ours: The configuration of our model; None: the same.
    """
    theirs = hf_model(resolved, std=0.1)
    model = our_model(ours or resolved, CpuBackend(), Mesh(1, 0), weights_of(resolved, std=0.1))
    batch = tokens(resolved, 2)
    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    logits = theirs(input_ids=inputs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    our_loss = model.loss(inputs, targets)  # type: ignore[operator]
    our_loss.backward()
    gradients = dict(model.named_parameters())

    def error(mine: Tensor, expected: Tensor) -> float:
        return float((mine - expected).detach().abs().max() / expected.detach().abs().max())

    with torch.no_grad():
        of_logits = error(model.logits(inputs), logits)  # type: ignore[operator]
    of_gradients = [error(gradients[name].grad, p.grad) for name, p in theirs.named_parameters()]  # type: ignore[arg-type]
    return of_logits, error(our_loss, loss), max(of_gradients)


@pytest.mark.parametrize("rope_type", SCALING_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_losses_and_gradients_are_those_of_transformers(family: str, rope_type: str) -> None:
    for seed in range(3):
        resolved = drawn_plan(family, rope_type, seed)
        assert max(relative_errors(resolved)) <= TOLERANCE, resolved.model


def without_attention_factor(model: DecoderConfig) -> dict[str, Any]:
    return {"rope_scaling": model.rope_scaling.model_copy(update={"attention_factor": 1.0})}  # type: ignore[union-attr]


def without_scaling(model: DecoderConfig) -> dict[str, Any]:
    return {"rope_scaling": None}


@pytest.mark.parametrize(
    ("rope_type", "defect"), [("yarn", without_attention_factor), *((kind, without_scaling) for kind in SCALING_TYPES)]
)
def test_a_defect_of_the_model_is_seen(rope_type: str, defect: Any) -> None:
    resolved = drawn_plan("llama", rope_type, seed=1)
    assert isinstance(resolved.model, DecoderConfig)
    changed = Resolved(resolved.config, resolved.family, resolved.model.model_copy(update=defect(resolved.model)))
    assert min(relative_errors(resolved, changed)) > 10 * TOLERANCE


SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}  # Qwen2.5's own advice
DEEPSEEK = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope_type", SCALING_TYPES)
def test_files_of_transformers_4_and_5_are_read_and_written_without_a_loss(
    family: str, rope_type: str, tmp_path: Path
) -> None:
    decoder = find_family(family)
    for seed in range(20):
        rng = Random(f"{family} {rope_type} {seed}")
        drawn = draw_scaling(rope_type, rng, rng.randint(8, 100_000))
        scaling, rest = drawn["rope_scaling"], {**SIZES, "max_position_embeddings": drawn["max_position_embeddings"]}
        legacy_type = {"type": rope_type, **{key: value for key, value in scaling.items() if key != "rope_type"}}
        four = {**rest, "model_type": family, "rope_theta": 5e5, "rope_scaling": scaling}
        older = {**four, "rope_scaling": legacy_type}
        five = {**rest, "model_type": family, "rope_parameters": {"rope_theta": 5e5, **scaling}}
        config = decoder.from_hf(four)
        assert decoder.from_hf(older) == decoder.from_hf(five) == config
        written = decoder.to_hf(config, "float32")
        assert (written["rope_scaling"], written["rope_theta"]) == (scaling, 5e5)
        assert written["rope_parameters"] == five["rope_parameters"]
        theirs = transformers.CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(written)))
        assert theirs.rope_parameters == five["rope_parameters"]
        theirs.save_pretrained(tmp_path)
        assert decoder.from_hf(json.loads((tmp_path / "config.json").read_text())) == config
        assert type(config).model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, (2.0, 4096)),
        ({"rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 1024}}, (4.0, 1024)),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 512}, (4.0, 512)),
    ],
    ids=["the model's length", "the ratio of the lengths", "a key of the file"],
)
def test_values_that_transformers_takes_from_other_keys(change: dict[str, Any], expected: tuple[float, int]) -> None:
    config = find_family("qwen2").from_hf({**SIZES, "model_type": "qwen2", "max_position_embeddings": 4096, **change})
    assert isinstance(config, DecoderConfig)
    scaling = config.rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings) == expected


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16_384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 10_240),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}}, 16_384),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 3000}}, 12_000),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1000}}, 4096),
    ],
)
def test_a_sequence_is_as_long_as_the_scaling_allows(model: dict[str, Any], longest: int) -> None:
    family = find_family("qwen3")
    config = family.config_type.model_validate({**SIZES, "max_position_embeddings": 4096, **model})
    assert config.longest_sequence[1] == longest
    assert family.check(config, tp=1, seq_len=longest) == []
    (problem,) = family.check(config, tp=1, seq_len=longest + 1)
    assert (problem.key, str(longest) in problem.reason) == ("train.seq_len", True)
    ways_out = ["max_position_embeddings, or extend the model's length with model.config.rope_scaling"]
    if longest > 4096:
        ways_out = ["model.config.rope_scaling.factor"]
    elif model:
        ways_out = ["model.config.max_position_embeddings"]
    assert problem.hint.endswith(ways_out[0])


@pytest.mark.parametrize(("positions", "longest"), [(131_072, 131_072), (8192, 262_144), (4096, 262_144)])
def test_llama_3_has_its_published_length_unless_that_is_the_original_one(positions: int, longest: int) -> None:
    family = find_family("llama")
    config = family.preset("llama3.2-1b").model_copy(update={"max_position_embeddings": positions})
    assert config.longest_sequence[1] == longest
    assert [bool(family.check(config, tp=1, seq_len=length)) for length in (longest, longest + 1)] == [False, True]


@pytest.mark.parametrize(
    ("scaling", "key", "words"),
    [
        ({"factor": 4.0}, "rope_scaling.rope_type", "required"),
        ({"rope_type": "longrope"}, "rope_scaling.rope_type", "'linear', 'dynamic', 'yarn' or 'llama3'"),
        (4, "rope_scaling", "dictionary"),
        ({"rope_type": "linear"}, "rope_scaling.factor", "required"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor", "greater than or equal to 1"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}, "rope_scaling.beta_fast", "not permitted"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            "rope_scaling.original_max_position_embeddings",
            "not permitted",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_scaling.original_max_position_embeddings", "required"),
        ({**YARN, "attention_factor": 0.0}, "rope_scaling.attention_factor", "greater than 0"),
        ({**YARN, "truncate": 1}, "rope_scaling.truncate", "boolean"),
        ({**YARN, "beta_fast": 0.5}, "rope_scaling", "beta_fast=0.5 must not be less than beta_slow=1.0"),
        ({**YARN, "beta_slow": 40.0}, "rope_scaling", "beta_fast=32.0 must not be less than beta_slow=40.0"),
    ],
)
def test_a_wrong_or_missing_field_is_named(scaling: object, key: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        find_family("llama").config_type.model_validate({**SIZES, "rope_scaling": scaling})
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == key
    assert words in error["msg"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta=1.0 must exceed 1 for rope_type=yarn"),
        ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "heads of width 2"),
    ],
)
def test_a_shape_that_a_scaling_cannot_have_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        find_family("llama").config_type.model_validate({**SIZES, **change})


@pytest.mark.parametrize(
    ("scaling", "key", "words"),
    [
        ({"type": "longrope", "factor": 2.0}, "rope_scaling.rope_type", "type 'longrope' are not supported"),
        ([1], "rope_scaling", "[1] is not a table"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": None}, "rope_scaling.truncate", "boolean"),
        ({"rope_type": "linear"}, "rope_scaling.factor", "required"),
        ({**YARN, "factor": None, "original_max_position_embeddings": 0}, "rope_scaling.factor", "valid number"),
    ],
)
def test_a_mistake_of_a_file_is_named_by_its_key(scaling: object, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_family("llama").from_hf({**SIZES, "model_type": "llama", "rope_scaling": scaling})
    problem = caught.value.problems[0]
    assert (problem.key, problem.origin) == (key, "config.json")
    assert words in problem.reason


def test_a_scaling_of_llama_3_is_written_as_before_other_types_were_known() -> None:
    """Checkpoints and compile keys of earlier runs are those of the same run now."""
    config = find_family("llama").preset("llama3.2-1b")
    table = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert config.model_dump()["rope_scaling"] == table
    assert type(config).model_validate(config.model_dump()) == config


@pytest.mark.parametrize("scaling", [YARN, DEEPSEEK])
def test_published_scalings_are_read(scaling: dict[str, Any]) -> None:
    config = find_family("qwen2").from_hf({**SIZES, "model_type": "qwen2", "rope_scaling": scaling})
    assert isinstance(config, DecoderConfig)
    assert isinstance(config.rope_scaling, YarnScaling)
    assert config.longest_sequence == ("original length * rope_scaling.factor", 131_072)
