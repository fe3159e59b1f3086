"""Llama's `config.json`, read and written so that transformers 4 and 5 both understand it.

The two differ in the rotary embedding (`rope_theta` and `rope_scaling` against one `rope_parameters`) and in the name
of the weights' type (`torch_dtype` against `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nxtrain.errors import ConfigError, Problem
from nxtrain_models.llama.config import LlamaConfig

_ORIGIN = "config.json"
_SAME = tuple(name for name in LlamaConfig.model_fields if not name.startswith("rope_"))
_UNSUPPORTED = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


def from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """Read a Hugging Face `config.json`.

    Raises:
        ConfigError: The file describes something that this family does not compute; every such key is named.
    """
    problems = [
        Problem(key, f"{hf[key]!r} is not supported; only {only!r} is", origin=_ORIGIN)
        for key, only in _UNSUPPORTED.items()
        if hf.get(key, only) != only
    ]
    values = {name: hf[name] for name in _SAME if name in hf}
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", hf.get("rope_theta"))
    if theta is not None:
        values["rope_theta"] = theta
    legacy_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", legacy_kind)
    if kind == "llama3":
        values["rope_scaling"] = rope
    elif kind != "default":
        reason = f"rotary embeddings of type {kind!r} are not supported; only 'default' and 'llama3' are"
        problems.append(Problem("rope_scaling.rope_type", reason, origin=_ORIGIN))
    try:
        config = _without_defaults(LlamaConfig.model_validate(values))
    except ValidationError as error:
        problems += [
            Problem(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "), origin=_ORIGIN)
            for e in error.errors()
        ]
    if problems:
        raise ConfigError(problems)
    return config


def _without_defaults(config: LlamaConfig) -> LlamaConfig:
    # transformers writes out sizes that follow from other sizes. Kept, they would contradict overrides of the latter,
    # and make a shape differ from the equal preset.
    changes: dict[str, None] = {}
    if config.num_key_value_heads == config.num_attention_heads:
        changes["num_key_value_heads"] = None
    if config.head_size * config.num_attention_heads == config.hidden_size:
        changes["head_dim"] = None
    return config.model_copy(update=changes)


def to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Write a Hugging Face `config.json`; `dtype` is torch's name of the weights' type."""
    values = config.model_dump()
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        scaling = {"rope_type": "llama3", **scaling}
    return {
        **values,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
