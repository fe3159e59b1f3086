"""TOML tables as nested dicts: flattening to dotted keys, merging, and writing values as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a nested table by dotted key, in order."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables recursively; values of `above` take precedence."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = merge(old, value)
        else:
            merged[name] = value
    return merged


def nest(key: str, value: object) -> dict[str, Any]:
    """Nest a value in tables for each part of its dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict), key
    return value


def toml_key(name: str) -> str:
    """Write one part of a TOML key, quoted if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def toml_value(value: object) -> str:
    """Write a value as TOML text that reads back exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return _toml_string(str(value))


def _toml_string(text: str) -> str:
    # JSON's escapes are valid TOML, with two exceptions: TOML requires DEL to be escaped, and has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
