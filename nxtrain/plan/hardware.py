"""Machines on which runs are planned: a table of instance types, and machines described by a TOML file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from nxtrain.common.errors import ConfigError, Problem, cause_of
from nxtrain.common.io.regular import read_text
from nxtrain.common.machines import ALIASES, MACHINES, Machine
from nxtrain.config.bounds import MAX_RANKS, quoted, shortened
from nxtrain.config.decode import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN = "own"
"""Kind of a machine whose chip is none of the known kinds."""

KINDS = (*dict.fromkeys(machine.kind for machine in MACHINES.values()), OWN)
"""Kinds of chips that a TOML file may name."""


def find_machine(name: str, own: Mapping[str, Machine] | None = None, key: str = "cluster.instance") -> Machine:
    """Find the machine of an instance type by its name, such as `p5.48xlarge`, or its short name, such as `p5`.

    Args:
        name: Name of the instance type.
        own: Machines of a TOML file, which take precedence over the built-in table.
        key: Configuration key or option that gave the name, for error messages.

    Raises:
        ConfigError: No machine has the name; the message lists the nearest names.
    """
    machines = {**MACHINES, **(own or {})}
    full_name = ALIASES.get(name, name)
    if name.endswith("xl"):
        full_name = f"{name}arge"
    for candidate in (name, full_name):
        if candidate in machines:
            return machines[candidate]
    close = get_close_matches(name, [*machines, *ALIASES], n=3, cutoff=0.4)
    hint = f"known: {', '.join(machines)}"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    raise ConfigError([Problem(key, f"{quoted(name)} is not an instance that nxtrain knows", hint=hint)])


class _Cell(NamedTuple):
    """Range of valid numbers for a value of a machine's TOML table.

    The bounds are far beyond real machines; they keep predicted times and costs finite.
    """

    least: float
    most: float
    meaning: str = ""
    is_whole: bool = False
    may_be_zero: bool = False

    def fits(self, value: Any) -> bool:
        """True for a number within the bounds of the cell."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if value == 0 and self.may_be_zero:
            return True
        in_bounds = self.least <= value <= self.most  # False for nan
        return in_bounds and (not self.is_whole or value == int(value))

    def wanted(self, key: str) -> str:
        """Description of the valid numbers, for error messages."""
        kind = "a whole number" if self.is_whole else "a number"
        zero = "0, or " if self.may_be_zero else ""
        return f"{key} = {kind}, {zero}{self.least} to {self.most}{self.meaning}"


_CELLS = {
    "devices": _Cell(1, MAX_RANKS, is_whole=True),
    "device_bytes": _Cell(1, 1e200, ": bytes of one device", is_whole=True),
    "device_flops": _Cell(1e-6, 1e200, ": dense bf16 operations per second of one device"),
    "float8_flops": _Cell(1e-6, 1e200, ": dense float8 operations per second of one device"),
    "memory_bytes_s": _Cell(1e-6, 1e200, ": bytes per second of one device's memory"),
    "link_bytes_s": _Cell(
        1e-6, 1e200, ": bytes per second of one device to the others of the machine", may_be_zero=True
    ),
    "network_bytes_s": _Cell(
        1e-6, 1e200, ": bytes per second of the machine's network, 0 if it trains alone", may_be_zero=True
    ),
    "host_bytes": _Cell(1, 1e200, ": bytes of the host", is_whole=True),
    "host_threads": _Cell(1, 1e200, is_whole=True),
    "price_usd_h": _Cell(0, 10**9),
}
_OPTIONAL = ("float8_flops", "price_usd_h")
_KEYS = ("kind", *_CELLS, "price_note")


def read_machines(path: Path) -> dict[str, Machine]:
    """Read machines from a TOML file with one table for each, named as the machine, with the fields of `Machine`.

    Raises:
        ConfigError: The file cannot be read, or a table lacks a value or has a wrong value; all problems together.
    """
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"--hardware {path}: {error.strerror or error}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"--hardware {path} is not valid TOML: {cause_of(error)}") from error
    problems: list[Problem] = []
    if not tables:
        problems.append(Problem("", f"--hardware {path} has no machine", hint="write a table [NAME] for each"))
    for name, table in tables.items():
        if isinstance(table, dict):
            problems += _problems(name, table, str(path))
        else:
            problems.append(Problem(name, f"{path}: a machine is a table, not {table!r}", hint=f"write [{name}]"))
    if problems:
        raise ConfigError(problems)
    return {name: _machine(name, table, path) for name, table in tables.items()}


def _problems(name: str, table: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Find all problems in the TOML table of a machine: unknown keys, missing values, and wrong values."""
    for key in sorted(table.keys() - set(_KEYS)):
        close = get_close_matches(key, _KEYS, n=1)
        yield Problem(f"{name}.{key}", "unknown key", path, f"known: {', '.join(close or _KEYS)}")
    kind = table.get("kind", OWN)
    if kind not in KINDS:
        yield Problem(f"{name}.kind", f"{kind!r} is not a known kind of chip", path, nearest(str(kind), KINDS))
    for key, cell in _CELLS.items():
        if key not in table:
            if key not in _OPTIONAL:
                yield Problem(f"{name}.{key}", "missing, and has no default", path, f"add {cell.wanted(key)}")
        elif not cell.fits(table[key]):
            reason = f"{shortened(repr(table[key]))} is not in the range of valid numbers"
            yield Problem(f"{name}.{key}", reason, path, f"use {cell.wanted(key)}")
    devices = table.get("devices")
    if _CELLS["devices"].fits(devices) and devices != 1 and table.get("link_bytes_s") == 0:
        hint = "give the bandwidth between them, or devices = 1"
        yield Problem(f"{name}.link_bytes_s", "0, but the machine has several devices", path, hint)


def _machine(name: str, table: Mapping[str, Any], path: Path) -> Machine:
    """Machine described by a TOML table without problems."""
    values: dict[str, Any] = {"kind": OWN, "price_note": str(path), **table}
    for key, cell in _CELLS.items():
        if key in values:
            values[key] = int(values[key]) if cell.is_whole else float(values[key])
    if "price_usd_h" not in table:
        values["price_note"] = f"{path} has no price_usd_h for {name}"
    values["price_note"] = str(values["price_note"])
    return Machine(name=name, accelerators=values["devices"], **values)
