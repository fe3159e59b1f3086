"""Keys of `config.json`: what is read gives the logits of transformers, and what is not computed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.checkpoint.convert.verify_export import open_hf_model
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import find_family
from tests.support.drawn import FAMILIES
from tests.support.models import WITH_EXPERTS

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "gpt_oss": {**EXPERTS, "head_dim": 8, "sliding_window": 8},
}
IN_TURN = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ALL_FULL = ["full_attention"] * LAYERS
LAST = ["full_attention"] * (LAYERS - 1) + ["sliding_attention"]
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
YARN = {"factor": 2.0, "original_max_position_embeddings": 16}
EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "head_dim null": {"head_dim": None},
    "rope of transformers 4": {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": None},
    "linear of transformers 4": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "default scaling": {"rope_parameters": None, "rope_scaling": {"type": "default"}},
    "default rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "theta alone": {"rope_parameters": {"rope_theta": 100.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **YARN}},
    "yarn without factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **YARN, "factor": None}},
    "rope for kinds of layers": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
    "factor without a type": {"rope_parameters": {"rope_theta": 100.0, "factor": 4.0}},
    "heads rotated in part": {"partial_rotary_factor": 0.5},
    "heads rotated in part, in the table": {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}},
    "layers in turn": {"layer_types": IN_TURN},
    "layers in turn, with a window": {"layer_types": IN_TURN, **WINDOW},
    "full layers": {"layer_types": ALL_FULL},
    "full layers, with a window": {"layer_types": ALL_FULL, **WINDOW},
    "last layer with a window": {"layer_types": LAST, **WINDOW, "max_window_layers": LAYERS - 1},
    "fewer layers": {"layer_types": ALL_FULL[1:]},
    "window": WINDOW,
    "attention_bias": {"attention_bias": True},
    "activation": {"hidden_act": "gelu"},
    "both directions": {"is_causal": False},
    "causal": {"is_causal": True},
    "layers of their own": {"per_layer_config": {"1": {"intermediate_size": 48}}},
}
NOT_COMPUTED: dict[str, dict[str, Any]] = {
    "attention_dropout": {"attention_dropout": 0.1},
    "partial_rotary_factor": {"partial_rotary_factor": 0.25},
    "is_causal": {"is_causal": False},
    "per_layer_config": {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
    "rope_scaling": {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}},
}
"""Edits that change the training or the logits in some release of transformers."""


def tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))


def scores_of_transformers(folder: Path) -> Tensor | None:
    """Logits of transformers; None if it cannot compute the model."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        with torch.no_grad():
            logits: Tensor = load(folder, dtype=torch.float32, attn_implementation="eager")(input_ids=tokens()).logits
    except (AttributeError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError):
        return None
    return logits


def scores(folder: Path) -> Tensor | None:
    """Our logits; None if the folder is refused."""
    try:
        with torch.no_grad():
            return open_hf_model(folder, CpuBackend(), 40).logits(tokens()).float()
    except ConfigError:
        return None


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_each_key_gives_the_logits_of_transformers_or_is_refused(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **OWN.get(family, {})})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.float().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    silent, refused = [], []
    for label, edit in EDITS.items():
        file.write_text(json.dumps({**written, **edit}))
        ours = scores(tmp_path)
        if ours is None:
            refused.append(label)
            continue
        theirs = scores_of_transformers(tmp_path)
        if theirs is not None and not torch.allclose(ours, theirs, atol=1e-3):
            silent.append(label)
    assert silent == []
    assert "nothing" not in refused
    assert len(refused) <= len(EDITS) // 2 + 1, refused


@pytest.mark.parametrize("key", NOT_COMPUTED)
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_a_property_that_is_not_computed_is_refused_by_its_key(family: str, key: str) -> None:
    content = {"model_type": family, **SIZES, **OWN.get(family, {}), **NOT_COMPUTED[key]}
    with pytest.raises(ConfigError) as caught:
        find_family(family).from_hf(content)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_gpt_oss_without_scaling_stays_without_it() -> None:
    """Its default is YaRN, which a file replaces by plain rotary embeddings."""
    family = find_family("gpt_oss")
    content = {"model_type": "gpt_oss", **SIZES, **OWN["gpt_oss"], "rope_parameters": {"rope_type": "default"}}
    config = family.from_hf(content)
    assert config.rope_scaling is None  # type: ignore[attr-defined]
    assert family.from_hf(family.to_hf(config, "float32")) == config
