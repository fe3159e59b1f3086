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

_REFUSED: dict[str, tuple[object, str]] = {
    "is_causal": (True, "a token attends to earlier tokens only"),
    "per_layer_config": ({}, "all layers have the same configuration"),
}
"""Keys that transformers accepts for every family, with their neutral value and the reason to refuse others."""

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
        if hf.get(key) not in (None, only)
    ]
    problems += [
        Problem(key, f"{hf[key]!r:.200} is not supported; {reason}", origin=_ORIGIN)
        for key, (neutral, reason) in _REFUSED.items()
        if hf.get(key) not in (None, neutral)
    ]
    values = {name: hf[name] for name in config_type.model_fields if name in hf and not name.startswith("rope_")}
    try:
        values |= _rope(hf, config_type.model_fields["max_position_embeddings"].default)
    except ConfigError as error:
        problems += error.problems
    try:
        config = _without_defaults(config_type.model_validate(values))
        problems += _other_layers(config, hf.get("layer_types"))
    except ValidationError as error:
        problems += [
            Problem(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "), origin=_ORIGIN)
            for e in error.errors()
        ]
    if problems:
        raise ConfigError(problems)
    return config


def layer_types(config: DecoderConfig) -> list[str]:
    """Return the kind of attention of each layer, as in `layer_types` of a `config.json`."""
    windows = [config.window_of(layer) for layer in range(config.num_hidden_layers)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _other_layers(config: DecoderConfig, given: object) -> list[Problem]:
    """Compare `layer_types` of a file with the layers of the model; transformers computes the layers by this list."""
    computed = layer_types(config)
    if not given or given == computed:
        return []
    hint = "a family computes one order of layers, which sliding_window and max_window_layers of the file choose"
    if not isinstance(given, list) or len(given) != len(computed):
        reason = f"{given!r:.200} is not a list of {len(computed)} layers, the num_hidden_layers of the file"
        return [Problem("layer_types", reason, origin=_ORIGIN)]
    layer = next(index for index, kind in enumerate(given) if kind != computed[index])
    reason = f"layer {layer} is {given[layer]!r}, but the other keys of the file make it {computed[layer]!r}"
    return [Problem("layer_types", reason, origin=_ORIGIN, hint=hint)]


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
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = hf.get("rope_theta")
    values: dict[str, Any] = {}
    if theta is not None:
        values["rope_theta"] = theta
    rotated = scaling.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        reason = f"{rotated!r} is not supported; heads are rotated whole, so only 1.0 is"
        raise ConfigError([Problem("partial_rotary_factor", reason, origin=_ORIGIN)])
    legacy_type = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", legacy_type)
    if rope_type == "default":
        _refuse_scaling(scaling)
        return {**values, "rope_scaling": None}
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


def _refuse_scaling(table: Mapping[str, Any]) -> None:
    """Refuse a table of plain rotary embeddings with values that would scale them."""
    for key, value in table.items():
        if key != "original_max_position_embeddings" and value not in (None, 1):
            reason = f"{key}={value!r:.100} has no meaning for the rope_type 'default', which is that of no rope_type"
            hint = "give the table its rope_type, or remove the key; there are no tables of single kinds of layers"
            raise ConfigError([Problem("rope_scaling", reason, origin=_ORIGIN, hint=hint)])


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
