"""Strict decoding of TOML tables to frozen pydantic models; one error has all problems and the nearest known names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.bounds import shortened
from nxtrain.config.tables import toml_value

M = TypeVar("M", bound=BaseModel)

MOST_PROBLEMS = 100
"""Maximum number of problems that are explained; further ones are counted. Finding the nearest name takes 0.1 ms."""

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_type": "a number",
    "int_type": "an integer",
    "model_type": "a table",
    "path_type": "a path",
    "string_type": "a string",
    "tuple_type": "a list",
}
_KINDS = {bool: "true or false", dict: "a table", float: "a number", int: "an integer", list: "a list", str: "a string"}

_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "trainium": "neuron", "trn": "neuron", "tpu": "xla"}
"""Common names of devices, and the backend of each. By its letters, "gpu" would be taken for "cpu"."""


def decode(
    model: type[M], table: Mapping[str, Any], origin_of: Callable[[str], str] = lambda _: "", prefix: str = ""
) -> M:
    """Decode a TOML table to a pydantic model.

    Args:
        model: Strict pydantic model.
        table: Table read from TOML.
        origin_of: Returns the origin of a dotted key's value.
        prefix: Dotted key of the table, with a dot at its end.

    Raises:
        ConfigError: The table has unknown keys, wrong types or invalid values. Up to `MOST_PROBLEMS` are explained.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # A default that depends on an invalid value is not a problem of its own.
        details = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
    problems = []
    for detail in _in_order(details)[:MOST_PROBLEMS]:
        path = [part for part in detail["loc"] if isinstance(part, str)]
        key = prefix + ".".join(path)
        reason, hint = _explain(model, detail, path, prefix)
        problems.append(Problem(key.rstrip("."), reason, origin_of(key.rstrip(".")), hint))
    rest = len(details) - len(problems)
    if rest:
        hint = "correct these first; a file in TOML of another program is not a configuration of nxtrain"
        problems.append(Problem("", f"{rest:,} more problems of the same configuration are not shown", hint=hint))
    raise ConfigError(problems)


def _in_order(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Order more than `MOST_PROBLEMS` problems: first one for each known key, then repetitions, then unknown keys."""
    if len(details) <= MOST_PROBLEMS:
        return details
    order = dict[int, int]()
    seen = set[tuple[int | str, ...]]()
    for index, detail in enumerate(details):
        key = tuple(part for part in detail["loc"] if isinstance(part, str))
        order[index] = int(key in seen)
        if detail["type"] == "extra_forbidden":
            order[index] = 2
        seen.add(key)
    return [details[index] for index in sorted(order, key=order.__getitem__)]


def nearest(name: str, names: Sequence[str], prefix: str = "") -> str:
    """Hint for an unknown name: the closest known name if any is close, else all known names."""
    close = get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(prefix + k for k in names)}"


def _explain(model: type[BaseModel], detail: ErrorDetails, path: list[str], prefix: str) -> tuple[str, str]:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return "unknown key", _unknown(model, path, prefix)
    if kind == "missing" and isinstance(value, list):
        return f"{_shown(value)}: entry {int(detail['loc'][-1]) + 1} of the list is missing", ""
    if kind == "missing":
        return "missing, and has no default", ""
    if kind == "literal_error":
        choices = [c.strip("'") for c in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        choices = [{"False": "false", "True": "true"}.get(choice, choice) for choice in choices]  # as in TOML
        hint = ""
        for choice in get_close_matches(_ALIASES.get(str(value).lower(), str(value)), choices, n=1):
            hint = f"did you mean {choice}?"
        return f"{_shown(value)} is not one of {', '.join(choices)}", hint
    if kind in _WANTED:
        what = _KINDS.get(type(value), "a date or time")
        text = _shown(str(value))
        quoted = f"in a file: {path[-1]} = {text}; on the command line: {prefix}{'.'.join(path)}='{text}'"
        hint = quoted if kind == "string_type" else ""
        return f"{_shown(value)} is {what}, but {_WANTED[kind]} is needed", hint
    rule = detail["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("Tuple should", "must")
    return (f"{_shown(value)}: {rule}" if path and not isinstance(value, Mapping) else rule), ""


def _shown(value: object) -> str:
    return shortened(toml_value(value))


def _unknown(model: type[BaseModel], path: list[str], prefix: str) -> str:
    *parents, leaf = path
    sections = [model]
    for name in parents:
        sections = list(chain.from_iterable(_tables(section).get(name, []) for section in sections))
    siblings: dict[str, None] = {}
    for section in sections:
        siblings |= dict.fromkeys(field.alias or name for name, field in section.model_fields.items())
    here = prefix + "".join(f"{parent}." for parent in parents)
    elsewhere = [prefix + key for key in dict.fromkeys(_keys(model)) if key.endswith(f".{leaf}")]
    if leaf in siblings:
        return f"{here.rstrip('.')} of this type has no such key"
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return nearest(leaf, list(siblings), here)


def _tables(model: type[BaseModel]) -> dict[str, list[type[BaseModel]]]:
    """Model types of each key that is a table; several if the content of the table decides."""
    tables: dict[str, list[type[BaseModel]]] = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            # On Python 3.10 even dict[str, Any] is an instance of type.
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                tables.setdefault(field.alias or name, []).append(kind)
    return tables


def _keys(model: type[BaseModel]) -> Iterator[str]:
    tables = _tables(model)
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in tables and get_origin(field.annotation) is not tuple:  # entries of a list have no key of their own
            for table in tables[key]:
                yield from (f"{key}.{inner}" for inner in _keys(table))
        else:
            yield key
