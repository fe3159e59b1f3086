"""TOML tables as nested dicts: flatten them to dotted keys, merge one over another, write values back as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value that is not a table, by dotted key, in order."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables in one, table by table; where both have a value, the one from `above`."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def nest(key: str, value: object) -> dict[str, Any]:
    """A value under its dotted key, as tables."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict), key
    return value


def toml_key(name: str) -> str:
    """One part of a key, quoted if TOML asks for it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def toml_value(value: object) -> str:
    """A value as TOML reads it back, exactly."""
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
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and surrogate pairs, which it does not know.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
