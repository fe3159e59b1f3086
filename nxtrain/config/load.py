"""Loading of configuration files and overrides into one frozen `RunConfig`, with the origin of each value."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError, Problem, cause_of
from nxtrain.common.io.regular import read_text
from nxtrain.config.bounds import MAX_DEPTH, faults, quoted, shortened
from nxtrain.config.decode import decode
from nxtrain.config.precision import expand
from nxtrain.config.schema import RunConfig
from nxtrain.config.tables import flatten, merge, nest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Loaded:
    """A configuration, and the origin of each of its values.

    Args:
        config: The decoded configuration.
        origins: Origin of every value by dotted key: `file:line`, `override` or `default`.
    """

    config: RunConfig
    origins: Mapping[str, str]

    @property
    def sets_anything(self) -> bool:
        """True if a file sets any value; an empty or truncated file sets none."""
        return any(origin not in {"default", "override"} for origin in self.origins.values())


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Load a configuration file with the files that it extends, and apply overrides.

    Args:
        path: TOML file. Its `extends = [...]` names further files, relative to this file. Later files take precedence,
            and the file itself takes precedence over all of them.
        overrides: Texts `dotted.key=value`. A value that is not TOML is a plain string.

    Raises:
        ConfigError: A file is missing or is not TOML, or values are invalid. The error lists all invalid values.
    """
    table, origins = _read(Path(path), ())
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(Problem("", f"{quoted(override)} is not an override", hint="write dotted.key=value"))
            continue
        try:
            added = nest(key, _parse_value(text))
        except (RecursionError, ValueError) as error:
            problems.append(Problem(shortened(key), _unparsed(error), "override"))
            continue
        out_of_bounds = _out_of_bounds(added, lambda _: "override")
        if out_of_bounds:
            problems += out_of_bounds
            continue
        table = merge(table, added)
        origins |= dict.fromkeys(flatten(added), "override")
    table, origins, contradictions = expand(table, origins)
    problems += contradictions
    firsts = _firsts(origins)
    try:
        config = decode(RunConfig, table, lambda key: firsts.get(key, ""))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Loaded(config, {key: origins.get(key, "default") for key in values(config)})


def values(config: RunConfig) -> dict[str, Any]:
    """All values of a configuration by dotted TOML key, in schema order."""
    return flatten(config.model_dump(by_alias=True))


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """Origin of a value, or of the first value of a table; empty if neither is set."""
    if key in origins:
        return origins[key]
    return next((origin for table, origin in origins.items() if f"{table}.".startswith(f"{key}.")), "")


def _firsts(origins: Mapping[str, str]) -> dict[str, str]:
    """Results of `origin_of` for all keys and tables at once. A search for each key would be slow for a long file."""
    firsts: dict[str, str] = {}
    for key, origin in origins.items():
        table = key
        while table and table not in firsts:
            firsts[table] = origin
            table = table.rpartition(".")[0]
    return firsts


def _out_of_bounds(table: Mapping[str, Any], origin: Callable[[str], str]) -> list[Problem]:
    """Problems of values outside the limits of `nxtrain.config.bounds`."""
    return [Problem(quoted(key)[1:-1], reason, origin(key)) for key, reason in faults(table)]


def _unparsed(error: Exception) -> str:
    """Reason why the parser failed on a text."""
    if isinstance(error, RecursionError):
        return f"tables and lists are nested more than {MAX_DEPTH} deep"
    return f"not readable as TOML: {cause_of(error)}"


def _read(path: Path, parents: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    text = _text(path)
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        raise ConfigError([Problem("extends", f"files extend each other in a circle: {chain}", str(path))])
    try:
        own = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"line (\d+)", str(error))
        line = match[1] if match else text.count("\n") + 1
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {_unparsed(error)}") from error
    lines = _lines(text)

    def line_of(key: str) -> str:
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return f"{path}:{lines[key]}" if key else str(path)

    problems = _out_of_bounds(own, line_of)
    if problems:
        raise ConfigError(problems)
    extends = own.pop("extends", [])
    if not isinstance(extends, list) or not all(isinstance(name, str) for name in extends):
        raise ConfigError([Problem("extends", f"{extends!r} is not a list of file names", str(path))])
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in extends:
        base, base_origins = _read(path.parent / name, (*parents, path.resolve()))
        table = merge(table, base)
        origins |= base_origins
    origins |= {key: line_of(key) for key in flatten(own)}
    return merge(table, own), origins


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        folder = path if path.is_dir() else path.parent
        names = [p.name for p in sorted(folder.glob("*.toml")) if p.is_file()]
        close = [] if path.is_dir() else get_close_matches(path.name, names, n=1)
        hint = ""
        if close:
            hint = f"did you mean {path.parent / close[0]}?"
        elif names:
            hint = f"found there: {', '.join(names)}"
        raise ConfigError([Problem("", f"cannot read {path}: {error.strerror}", hint=hint)]) from error


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _lines(text: str) -> dict[str, int]:
    """Line number of each key by dotted name, since `tomllib` does not report lines."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        entry = re.match(r"\s*([\w.-]+)\s*=", line)
        if header:
            section = f"{header[1]}."
        elif entry:
            lines.setdefault(section + entry[1], number)
    return lines
