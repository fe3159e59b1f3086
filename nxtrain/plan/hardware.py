"""Accelerator instances with the source of every value, and machines that a TOML file describes.

Cores, memory and peaks of Trainium instances that nxtrain can start on come from `nxtrain.backends.neuron.hardware`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nxtrain.backends.neuron.hardware import GIB, INSTANCES
from nxtrain.common.errors import ConfigError, Problem, cause_of
from nxtrain.common.io.regular import read_text
from nxtrain.config.bounds import MAX_RANKS, quoted, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GB = 10**9
GIGABIT = 10**9 / 8


@dataclass(frozen=True)
class Machine:
    """One kind of instance, as a prediction sees it.

    Args:
        name: Name of the instance type.
        kind: Chip, which selects the constants of `nxtrain.plan.speed`.
        devices: Ranks per machine: GPUs, or logical NeuronCores.
        device_bytes: Device memory of one rank.
        device_flops: Dense bfloat16 operations per second of one rank.
        memory_bytes_s: Bandwidth of the device memory of one rank.
        link_bytes_s: Bandwidth of one rank to the others of its machine, one direction; 0: it has one device.
        network_bytes_s: Bandwidth of the machine's network for collectives; 0: machines cannot train together.
        host_bytes: Memory of the host.
        host_threads: Hardware threads of the host.
        price_usd_h: On-demand price of an hour; None: unknown.
        price_note: Date and source of the price, or the reason for its absence.
        sources: Source of each value, by field.
    """

    name: str
    kind: str
    devices: int
    device_bytes: int
    device_flops: float
    memory_bytes_s: float
    link_bytes_s: float
    network_bytes_s: float
    host_bytes: int
    host_threads: int
    price_usd_h: float | None = None
    price_note: str = "no price is recorded for this instance; give one with --price"
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


_ARCH = "aws-neuron-sdk, about-neuron/arch/neuron-hardware/"
_TABLE = "nxtrain/backends/neuron/hardware.py, which names the pages of aws-neuron-sdk"
_EC2 = "https://aws.amazon.com/ec2/instance-types/"
_SLIDES = "AWS slides on foundation models, 2025-02, Amazon EC2 instances for FM training"
_PRICE = "on demand, N. Virginia, 2025-02 (AWS slides on foundation models)"
_ASKED = "no price is recorded for this instance: AWS sells it by Capacity Block or region; give one with --price"


def _sources(**given: str) -> dict[str, str]:
    return given


def _trainium(
    name: str, page: str, *, bandwidth: float, link: float, network: float, host_gib: int, price: float | None = None
) -> Machine:
    known = INSTANCES[name]
    bandwidth_per_rank, link_per_rank = (x * known.core_bytes / _CHIP_BYTES[known.target] for x in (bandwidth, link))
    page = _ARCH + page
    return Machine(
        name=name,
        kind="trn1" if known.target.startswith("trn1") else known.target,
        devices=known.num_cores,
        device_bytes=known.core_bytes,
        device_flops=known.core_flops,
        memory_bytes_s=bandwidth_per_rank,
        link_bytes_s=link_per_rank,
        network_bytes_s=network * GIGABIT,
        host_bytes=host_gib * GIB,
        host_threads=known.host_threads,
        price_usd_h=price,
        price_note=_PRICE if price else _ASKED,
        sources=_sources(
            **dict.fromkeys(("devices", "device_bytes", "device_flops", "host_threads"), _TABLE),
            **dict.fromkeys(("memory_bytes_s", "link_bytes_s", "network_bytes_s", "host_bytes"), page),
            **({"price_usd_h": _SLIDES} if price else {}),
        ),
    )


_CHIP_BYTES = {"trn1": 32 * GIB, "trn1n": 32 * GIB, "trn2": 96 * GIB}


@dataclass(frozen=True)
class _ChipFigures:
    """Chip and the source of its values: memory in bytes, teraflops, and bytes per second in one direction."""

    kind: str
    source: str
    memory: float
    teraflops: float
    bandwidth: float
    link: float


@dataclass(frozen=True)
class _Box:
    """Machine around chips: their number, the network in Gb/s, and the host."""

    chips: int
    network: float
    host_gib: int
    threads: int
    price: float | None = None


def _of_chips(name: str, chip: _ChipFigures, box: _Box, *, ranks: int = 1) -> Machine:
    """Machine of equal chips with `ranks` ranks each."""
    machine = f"{chip.source} (device); {_EC2}{name.partition('.')[0]} (machine)" if ranks == 1 else chip.source
    named = ("devices", "device_bytes", "device_flops", "memory_bytes_s", "link_bytes_s", "network_bytes_s")
    return Machine(
        name=name,
        kind=chip.kind,
        devices=box.chips * ranks,
        device_bytes=int(chip.memory / ranks),
        device_flops=chip.teraflops * 1e12 / ranks,
        memory_bytes_s=chip.bandwidth / ranks,
        link_bytes_s=chip.link / ranks if box.chips * ranks > 1 else 0.0,
        network_bytes_s=box.network * GIGABIT,
        host_bytes=box.host_gib * GIB,
        host_threads=box.threads,
        price_usd_h=box.price,
        price_note=_PRICE if box.price else _ASKED,
        sources=_sources(
            **dict.fromkeys((*named, "host_bytes", "host_threads"), machine),
            **({"price_usd_h": _SLIDES} if box.price else {}),
        ),
    )


# A data sheet's bandwidth of links is the sum of both directions.
_A100_40 = _ChipFigures("a100", "NVIDIA A100 data sheet", 40 * GIB, 312, 1555 * GB, 300 * GB)
_A100_80 = _ChipFigures("a100", "NVIDIA A100 data sheet", 80 * GIB, 312, 2039 * GB, 300 * GB)
_H100 = _ChipFigures("hopper", "NVIDIA H100 SXM data sheet", 80 * GIB, 989, 3350 * GB, 450 * GB)
_H200 = _ChipFigures("hopper", "NVIDIA H200 SXM data sheet", 141 * GB, 989, 4800 * GB, 450 * GB)
_A10G = _ChipFigures("a10g", "NVIDIA A10 data sheet, with the A10G's 70e12 operations", 24 * GIB, 70, 600 * GB, 32 * GB)
_L40S = _ChipFigures("l40s", "NVIDIA L40S data sheet", 48 * GB, 362, 864 * GB, 32 * GB)
_TRN2 = _ChipFigures("trn2", _ARCH + "trn2-arch.rst", 96 * GIB, 667, 2900 * GB, 1024 * GB)
_TRN3 = _ChipFigures("trn3", _ARCH + " (Trn3 UltraServers)", 144 * GIB, 671, 4900 * GB, 2048 * GIB)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _trainium("trn1.2xlarge", "trn1-arch.rst", bandwidth=820 * GIB, link=384 * GIB, network=0, host_gib=32),
        _trainium(
            "trn1.32xlarge",
            "trn1-arch.rst",
            bandwidth=820 * GIB,
            link=384 * GIB,
            network=800,
            host_gib=512,
            price=21.50,
        ),
        _trainium("trn1n.32xlarge", "trn1-arch.rst", bandwidth=820 * GIB, link=768 * GIB, network=1600, host_gib=512),
        _of_chips("trn2.3xlarge", _TRN2, _Box(1, 0, 128, 12), ranks=4),
        _trainium("trn2.48xlarge", "trn2-arch.rst", bandwidth=2900 * GB, link=1024 * GB, network=3200, host_gib=2048),
        _trainium("trn2u.48xlarge", "trn2-arch.rst", bandwidth=2900 * GB, link=1024 * GB, network=3200, host_gib=2048),
        _of_chips("trn2-ultraserver", _TRN2, _Box(64, 12_800, 8192, 768), ranks=4),
        _of_chips("trn3-gen1-ultraserver", _TRN3, _Box(64, 12_800, 8192, 768), ranks=4),
        _of_chips("trn3-gen2-ultraserver", _TRN3, _Box(144, 28_800, 27 * 1024, 2304), ranks=4),
        _of_chips("p4d.24xlarge", _A100_40, _Box(8, 400, 1152, 96, 32.77)),
        _of_chips("p4de.24xlarge", _A100_80, _Box(8, 400, 1152, 96, 40.96)),
        _of_chips("p5.48xlarge", _H100, _Box(8, 3200, 2048, 192, 98.32)),
        _of_chips("p5e.48xlarge", _H200, _Box(8, 3200, 2048, 192)),
        _of_chips("p5en.48xlarge", _H200, _Box(8, 3200, 2048, 192)),
        _of_chips("g5.2xlarge", _A10G, _Box(1, 10, 32, 8)),
        _of_chips("g5.12xlarge", _A10G, _Box(4, 40, 192, 48)),
        _of_chips("g5.48xlarge", _A10G, _Box(8, 100, 768, 192)),
        _of_chips("g6e.2xlarge", _L40S, _Box(1, 20, 64, 8)),
        _of_chips("g6e.12xlarge", _L40S, _Box(4, 100, 384, 48)),
        _of_chips("g6e.48xlarge", _L40S, _Box(8, 400, 1536, 192)),
    )
}
"""Instances by name."""

OWN = "own"
"""Kind of a machine whose chip has no constants of its own."""

KINDS = (*dict.fromkeys(machine.kind for machine in MACHINES.values()), OWN)
"""Kinds of chips."""

ALIASES = {
    "trn1": "trn1.32xlarge",
    "trn1n": "trn1n.32xlarge",
    "trn2": "trn2.48xlarge",
    "trn2u": "trn2-ultraserver",
    "trn3": "trn3-gen1-ultraserver",
    "p4d": "p4d.24xlarge",
    "p4de": "p4de.24xlarge",
    "p5": "p5.48xlarge",
    "p5e": "p5e.48xlarge",
    "p5en": "p5en.48xlarge",
    "g5": "g5.48xlarge",
    "g6e": "g6e.48xlarge",
}
"""Short names of instances."""


def find_machine(name: str, own: Mapping[str, Machine] | None = None, key: str = "cluster.instance") -> Machine:
    """Machine of a name, short names included.

    Args:
        name: Name of the instance.
        own: Machines of a file, which win over the table.
        key: Key or option that gave the name, for messages.

    Raises:
        ConfigError: No such machine; the message has the nearest names.
    """
    machines = {**MACHINES, **(own or {})}
    whole = f"{name}arge" if name.endswith("xl") else ALIASES.get(name, "")
    if found := machines.get(name) or machines.get(whole):
        return found
    close = get_close_matches(name, [*machines, *ALIASES], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(machines)}"
    raise ConfigError([Problem(key, f"{quoted(name)} is no instance that nxtrain knows", hint=hint)])


_NUMBERS = {
    "devices": int,
    "device_bytes": int,
    "device_flops": float,
    "memory_bytes_s": float,
    "link_bytes_s": float,
    "network_bytes_s": float,
    "host_bytes": int,
    "host_threads": int,
    "price_usd_h": float,
}
_UNITS = {
    "device_bytes": ": bytes of one device",
    "device_flops": ": dense bf16 operations per second of one device",
    "memory_bytes_s": ": bytes per second of one device's memory",
    "link_bytes_s": ": bytes per second of one device to the others of the machine",
    "network_bytes_s": ": bytes per second of the machine's network, 0 if it trains alone",
    "host_bytes": ": bytes of the host",
}
_MAY_BE_ZERO = ("link_bytes_s", "network_bytes_s")


def read_machines(path: Path) -> dict[str, Machine]:
    """Machines of a TOML file: a table for each, named as the machine, with the fields of `Machine`.

    Raises:
        ConfigError: The file cannot be read, or a table lacks a value or has a wrong one; all problems together.
    """
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"--hardware {path}: {error.strerror or error}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"--hardware {path} is no TOML: {cause_of(error)}") from error
    problems: list[Problem] = []
    found = {name: machine for name, table in tables.items() if (machine := _machine(name, table, path, problems))}
    if not tables:
        problems.append(Problem("", f"--hardware {path} has no machine", hint="write a table [NAME] for each"))
    if problems:
        raise ConfigError(problems)
    return found


def _machine(name: str, table: Any, path: Path, problems: list[Problem]) -> Machine | None:
    if not isinstance(table, dict):
        problems.append(Problem(name, f"{path}: a machine is a table, not {table!r}", hint=f"write [{name}]"))
        return None
    texts = {"kind", "price_note"}
    known = [each.name for each in fields(Machine) if each.name in _NUMBERS or each.name in texts]
    before = len(problems)
    for key in sorted(table.keys() - set(known)):
        close = get_close_matches(key, known, n=1)
        problems.append(Problem(f"{name}.{key}", "unknown key", str(path), f"known: {', '.join(close or known)}"))
    values: dict[str, Any] = {"kind": table.get("kind", OWN), "price_note": str(table.get("price_note", path))}
    if values["kind"] not in KINDS:
        close = get_close_matches(str(values["kind"]), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)}"
        problems.append(Problem(f"{name}.kind", f"{values['kind']!r} is no chip with constants", str(path), hint))
    for key, number in _NUMBERS.items():
        value = table.get(key)
        if value is None and key == "price_usd_h":
            values["price_note"] = f"{path} has no price_usd_h for {name}"
        elif value is None:
            problems.append(Problem(f"{name}.{key}", "missing, and has no default", str(path), f"add {_wanted(key)}"))
        elif not _fits(key, value):
            reason = f"{shortened(repr(value))} is no number that a machine can have"
            problems.append(Problem(f"{name}.{key}", reason, str(path), f"use {_wanted(key)}"))
        else:
            values[key] = number(value)
    if values.get("devices", 1) > 1 and values.get("link_bytes_s") == 0:
        reason, hint = "0, but the machine has several devices", "give the bandwidth between them, or devices = 1"
        problems.append(Problem(f"{name}.link_bytes_s", reason, str(path), hint))
    if len(problems) > before:
        return None
    return Machine(name=name, sources=dict.fromkeys(values, str(path)), **values)


def _wanted(key: str) -> str:
    """Text of the numbers that a field may have."""
    kind = "a whole number" if _NUMBERS[key] is int else "a number"
    least, most = _bounds(key)
    return f"{key} = {kind}, {'0, or ' if key in _MAY_BE_ZERO else ''}{least} to {most}{_UNITS.get(key, '')}"


def _bounds(key: str) -> tuple[float, float]:
    """Least and largest number of a field, far from those of machines: times and costs that follow stay finite."""
    if key == "price_usd_h":
        return 0, 10**9
    return 1 if _NUMBERS[key] is int else 1e-6, MAX_RANKS if key == "devices" else 1e200


def _fits(key: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    least, most = _bounds(key)
    if not least <= value <= most:  # nor nan
        return value == 0 and key in _MAY_BE_ZERO
    return _NUMBERS[key] is float or value == int(value)
