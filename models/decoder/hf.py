"""Hugging Face's `config.json` of a decoder, read and written so that transformers 4 and 5 both understand it.

The two differ in the rotary embedding (`rope_theta` and `rope_scaling` against one `rope_parameters`) and in the name
of the weights' type (`torch_dtype` against `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from nxtrain.common.errors import ConfigError, Problem
from nxtrain_models.decoder.config import DecoderConfig

_ORIGIN = "config.json"

Config = TypeVar("Config", bound=DecoderConfig)


def from_hf(config_type: type[Config], fixed: Mapping[str, object], hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json`.

    Args:
        config_type: Configuration of the family.
        fixed: Keys of the file whose only supported value is given, which is the default of transformers too.
        hf: Content of the file.

    Raises:
        ConfigError: The file describes something that this family does not compute; every such key is named.
    """
    problems = [
        Problem(key, f"{hf[key]!r} is not supported; only {only!r} is", origin=_ORIGIN)
        for key, only in fixed.items()
        if hf.get(key, only) != only
    ]
    layers = hf.get("layer_types") or []
    has_window = "sliding_window" in config_type.model_fields and hf.get("sliding_window") is not None
    computed = ("full_attention", *(["sliding_attention"] if has_window else []))
    if not isinstance(layers, list) or any(kind not in computed for kind in layers):
        reason = f"attention of other layers than 'full_attention' is not supported: {layers!r:.200}"
        problems.append(Problem("layer_types", reason, origin=_ORIGIN))
    values = {name: hf[name] for name in config_type.model_fields if name in hf and not name.startswith("rope_")}
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
        config = _without_defaults(config_type.model_validate(values))
    except ValidationError as error:
        problems += [
            Problem(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "), origin=_ORIGIN)
            for e in error.errors()
        ]
    if problems:
        raise ConfigError(problems)
    return config


def _without_defaults(config: Config) -> Config:
    # transformers writes out sizes that follow from other sizes. Kept, they would contradict overrides of the latter,
    # and make a shape differ from the equal preset.
    follows = {
        "num_key_value_heads": config.num_key_value_heads == config.num_attention_heads,
        "head_dim": config.head_size * config.num_attention_heads == config.hidden_size,
    }
    fields = type(config).model_fields
    return config.model_copy(
        update={name: None for name, does in follows.items() if does and fields[name].default is None}
    )


def to_hf(config: DecoderConfig, fixed: Mapping[str, object], architecture: str, dtype: str) -> dict[str, Any]:
    """Write a Hugging Face `config.json`.

    Args:
        config: Configuration of the model.
        fixed: Keys of the file that have the same value for every model of the family.
        architecture: Class of the model in transformers.
        dtype: torch's name of the weights' type.
    """
    values = config.model_dump()
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        scaling = {"rope_type": "llama3", **scaling}
    return {
        **values,
        "architectures": [architecture],
        **fixed,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
