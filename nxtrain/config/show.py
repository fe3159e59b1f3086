"""Output of a configuration as TOML that loads back exactly, as JSON, and as a list of all keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from nxtrain.config.load import Loaded
from nxtrain.config.schema import RunConfig
from nxtrain.config.tables import toml_key, toml_value

_KIND_NAMES = {bool: "bool", int: "int", float: "float", str: "string", Path: "path", dict: "table", tuple: "list"}


@dataclass(frozen=True)
class Key:
    """One key of the configuration, for documentation.

    Args:
        name: Dotted key.
        kind: Type of the value, or the possible values.
        default: Default value, as TOML.
        doc: Meaning of the key, with its unit.
    """

    name: str
    kind: str
    default: str
    doc: str


def dump(config: RunConfig, origins: Mapping[str, str] | None = None) -> str:
    """Write a configuration as TOML, which `load` reads back to an equal configuration.

    Args:
        config: The configuration.
        origins: Origin of each value by dotted key, written as comments.
    """
    return dump_table(config.model_dump(by_alias=True), origins)


def dump_table(table: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """Write nested tables as TOML, with the origin of each value as a comment; see `dump`."""
    return "\n".join(_lines(table, "", origins or {})).lstrip("\n") + "\n"


def to_json(loaded: Loaded) -> dict[str, Any]:
    """Values of a configuration by section, with a table `origins` by dotted key, for JSON."""
    return {**loaded.config.model_dump(by_alias=True, mode="json"), "origins": dict(loaded.origins)}


def keys() -> list[Key]:
    """All keys of the configuration, in schema order."""
    return list(_keys(RunConfig(), ""))


def _lines(table: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            origin = origins.get(f"{prefix}{name}", "")
            yield f"{toml_key(name)} = {toml_value(value)}" + (f"  # {origin}" if origin else "")
    for name, value in table.items():
        if isinstance(value, Mapping):
            path = f"{prefix}{toml_key(name)}"
            yield f"\n[{path}]"
            yield from _lines(value, f"{path}.", origins)


def _keys(section: BaseModel, prefix: str) -> Iterator[Key]:
    for attribute, field in type(section).model_fields.items():
        name, default = prefix + (field.alias or attribute), getattr(section, attribute)
        if isinstance(default, BaseModel):
            yield from _keys(default, f"{name}.")
        else:
            yield Key(name, _kind(field.annotation), toml_value(default), field.description or "")


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(value if isinstance(value, str) else toml_value(value) for value in get_args(annotation))
    return _KIND_NAMES[get_origin(annotation) or annotation]
