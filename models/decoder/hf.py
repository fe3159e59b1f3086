"""Conversion of a decoder's configuration from and to Hugging Face's `config.json`, for transformers 4 and 5.

The releases differ in the rotary embedding: `rope_theta` and `rope_scaling`, or one `rope_parameters`. They also differ
in the name of the weights' type: `torch_dtype` or `dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.nn.rope_scaling import SCALINGS
from nxtrain_models.decoder.config import DecoderConfig

_ORIGIN = "config.json"

Config = TypeVar("Config", bound=DecoderConfig)


def from_hf(config_type: type[Config], fixed: Mapping[str, object], hf: Mapping[str, Any]) -> Config:
    """Convert a Hugging Face `config.json` to a configuration of a family.

    Args:
        config_type: Configuration class of the family.
        fixed: Keys of the file with their only supported value, which is also transformers' default.
        hf: Content of the file.

    Raises:
        ConfigError: The file has keys or values that the family does not support; the error names all of them.
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
    try:
        values |= _rope(hf, config_type.model_fields["max_position_embeddings"].default)
    except ConfigError as error:
        problems += error.problems
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


def _rope(hf: Mapping[str, Any], default_length: int) -> dict[str, Any]:
    """Read base and scaling of the rotary embedding, with defaults from other keys of the file, as in transformers.

    Args:
        hf: Content of the file.
        default_length: `max_position_embeddings` of a file without this key.
    """
    table = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise ConfigError([Problem("rope_scaling", f"{table!r:.200} is not a table", origin=_ORIGIN)])
    scaling = dict(table)
    theta = scaling.pop("rope_theta", hf.get("rope_theta"))
    values = {}
    if theta is not None:
        values["rope_theta"] = theta
    legacy_type = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", legacy_type)
    if rope_type == "default":
        return values
    if rope_type not in tuple(SCALINGS):
        names = ", ".join(repr(name) for name in SCALINGS)
        reason = f"rotary embeddings of type {rope_type!r} are not supported; only 'default', {names} are"
        raise ConfigError([Problem("rope_scaling.rope_type", reason, origin=_ORIGIN)])
    if rope_type in ("yarn", "llama3"):
        length = hf.get("max_position_embeddings", default_length)
        original = hf.get("original_max_position_embeddings")
        if original is None:
            original = scaling.get("original_max_position_embeddings", length)
        scaling["original_max_position_embeddings"] = original
        are_counts = isinstance(length, int) and isinstance(original, int) and original > 0
        if rope_type == "yarn" and scaling.get("factor", 1) is None and are_counts:
            scaling["factor"] = length / original
    return {**values, "rope_scaling": {"rope_type": rope_type, **scaling}}


def _without_defaults(config: Config) -> Config:
    # transformers writes sizes that follow from other sizes. If kept, they would contradict overrides of the other
    # sizes, and make a configuration differ from an equal preset.
    follows = {
        "num_key_value_heads": config.num_key_value_heads == config.num_attention_heads,
        "head_dim": config.head_size * config.num_attention_heads == config.hidden_size,
    }
    fields = type(config).model_fields
    return config.model_copy(
        update={name: None for name, does in follows.items() if does and fields[name].default is None}
    )


def to_hf(config: DecoderConfig, fixed: Mapping[str, object], architecture: str, dtype: str) -> dict[str, Any]:
    """Convert a model configuration to a Hugging Face `config.json`.

    Args:
        config: Configuration of the model.
        fixed: Keys of the file with the same value for every model of the family.
        architecture: Name of the model class in transformers.
        dtype: torch's name of the weights' type.
    """
    values = config.model_dump()
    del values["rope_scaling"]
    scaling = None
    if config.rope_scaling is not None:
        fields = config.rope_scaling.model_dump(exclude_defaults=True)
        scaling = {"rope_type": config.rope_scaling.rope_type, **fields}
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
