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
from nxtrain.errors import ConfigError, Problem
from nxtrain.io.regular import read_text

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


def _of_chips(
    name: str,
    kind: str,
    source: str,
    *,
    chips: int,
    ranks: int,
    memory: float,
    teraflops: float,
    bandwidth: float,
    link: float,
    network: float,
    host_gib: int,
    threads: int,
    price: float | None = None,
    price_source: str = _SLIDES,
) -> Machine:
    """Machine of equal chips with `ranks` ranks each; values are those of a chip."""
    named = ("devices", "device_bytes", "device_flops", "memory_bytes_s", "link_bytes_s", "network_bytes_s")
    return Machine(
        name=name,
        kind=kind,
        devices=chips * ranks,
        device_bytes=int(memory / ranks),
        device_flops=teraflops * 1e12 / ranks,
        memory_bytes_s=bandwidth / ranks,
        link_bytes_s=link / ranks,
        network_bytes_s=network * GIGABIT,
        host_bytes=host_gib * GIB,
        host_threads=threads,
        price_usd_h=price,
        price_note=_PRICE if price else _ASKED,
        sources=_sources(
            **dict.fromkeys((*named, "host_bytes", "host_threads"), source),
            **({"price_usd_h": price_source} if price else {}),
        ),
    )


def _gpus(
    name: str,
    kind: str,
    data_sheet: str,
    *,
    gpus: int = 8,
    memory: float,
    teraflops: float,
    bandwidth: float,
    link: float,
    network: float,
    host_gib: int,
    threads: int,
    price: float | None = None,
) -> Machine:
    """Machine of GPUs; `link` is the data sheet's sum of both directions."""
    return _of_chips(
        name,
        kind,
        f"{data_sheet} (device); {_EC2}{name.partition('.')[0]} (machine)",
        chips=gpus,
        ranks=1,
        memory=memory,
        teraflops=teraflops,
        bandwidth=bandwidth,
        link=link / 2,
        network=network,
        host_gib=host_gib,
        threads=threads,
        price=price,
    )


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 SXM data sheet"
_H200 = "NVIDIA H200 SXM data sheet"
_A10G = "NVIDIA A10 data sheet; AWS's A10G has 70e12 dense bf16 operations per second"
_L40S = "NVIDIA L40S data sheet"
_TRN3 = _ARCH + " (Trn3 UltraServers)"

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
        _of_chips(
            "trn2.3xlarge",
            "trn2",
            _ARCH + "trn2-arch.rst",
            chips=1,
            ranks=4,
            memory=96 * GIB,
            teraflops=667,
            bandwidth=2900 * GB,
            link=1024 * GB,
            network=0,
            host_gib=128,
            threads=12,
        ),
        _trainium("trn2.48xlarge", "trn2-arch.rst", bandwidth=2900 * GB, link=1024 * GB, network=3200, host_gib=2048),
        _trainium("trn2u.48xlarge", "trn2-arch.rst", bandwidth=2900 * GB, link=1024 * GB, network=3200, host_gib=2048),
        _of_chips(
            "trn2-ultraserver",
            "trn2",
            _ARCH + "trn2-arch.rst",
            chips=64,
            ranks=4,
            memory=96 * GIB,
            teraflops=667,
            bandwidth=2900 * GB,
            link=1024 * GB,
            network=3200,
            host_gib=8192,
            threads=768,
        ),
        _of_chips(
            "trn3-gen1-ultraserver",
            "trn3",
            _TRN3,
            chips=64,
            ranks=4,
            memory=144 * GIB,
            teraflops=671,
            bandwidth=4900 * GB,
            link=2048 * GIB,
            network=12_800,
            host_gib=8192,
            threads=768,
        ),
        _of_chips(
            "trn3-gen2-ultraserver",
            "trn3",
            _TRN3,
            chips=144,
            ranks=4,
            memory=144 * GIB,
            teraflops=671,
            bandwidth=4900 * GB,
            link=2048 * GIB,
            network=28_800,
            host_gib=27 * 1024,
            threads=2304,
        ),
        _gpus(
            "p4d.24xlarge",
            "a100",
            _A100,
            memory=40 * GIB,
            teraflops=312,
            bandwidth=1555 * GB,
            link=600 * GB,
            network=400,
            host_gib=1152,
            threads=96,
            price=32.77,
        ),
        _gpus(
            "p4de.24xlarge",
            "a100",
            _A100,
            memory=80 * GIB,
            teraflops=312,
            bandwidth=2039 * GB,
            link=600 * GB,
            network=400,
            host_gib=1152,
            threads=96,
            price=40.96,
        ),
        _gpus(
            "p5.48xlarge",
            "hopper",
            _H100,
            memory=80 * GIB,
            teraflops=989,
            bandwidth=3350 * GB,
            link=900 * GB,
            network=3200,
            host_gib=2048,
            threads=192,
            price=98.32,
        ),
        *(
            _gpus(
                name,
                "hopper",
                _H200,
                memory=141 * GB,
                teraflops=989,
                bandwidth=4800 * GB,
                link=900 * GB,
                network=3200,
                host_gib=2048,
                threads=192,
            )
            for name in ("p5e.48xlarge", "p5en.48xlarge")
        ),
        *(
            _gpus(
                f"g5.{size}xlarge",
                "a10g",
                _A10G,
                gpus=gpus,
                memory=24 * GIB,
                teraflops=70,
                bandwidth=600 * GB,
                link=64 * GB if gpus > 1 else 0,
                network=network,
                host_gib=16 * size,
                threads=4 * size,
            )
            for size, gpus, network in ((2, 1, 10), (12, 4, 40), (48, 8, 100))
        ),
        *(
            _gpus(
                f"g6e.{size}xlarge",
                "l40s",
                _L40S,
                gpus=gpus,
                memory=48 * GB,
                teraflops=362,
                bandwidth=864 * GB,
                link=64 * GB if gpus > 1 else 0,
                network=network,
                host_gib=32 * size,
                threads=4 * size,
            )
            for size, gpus, network in ((2, 1, 20), (12, 4, 100), (48, 8, 400))
        ),
    )
}
"""Instances by name."""

ALIASES = {
    "trn1.2xl": "trn1.2xlarge",
    "trn1.32xl": "trn1.32xlarge",
    "trn1n": "trn1n.32xlarge",
    "trn1n.32xl": "trn1n.32xlarge",
    "trn2.3xl": "trn2.3xlarge",
    "trn2.48xl": "trn2.48xlarge",
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


def find_machine(name: str, own: Mapping[str, Machine] | None = None) -> Machine:
    """Machine of a name, short names included.

    Args:
        name: Name of the instance.
        own: Machines of a file, which win over the table.

    Raises:
        ConfigError: No such machine; the message has the nearest names.
    """
    machines = {**MACHINES, **(own or {})}
    if found := machines.get(name) or machines.get(ALIASES.get(name, "")):
        return found
    close = get_close_matches(name, [*machines, *ALIASES], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(machines)}"
    raise ConfigError([Problem("cluster.instance", f"{name!r} is no instance that nxtrain knows", hint=hint)])


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
_MAY_BE_ZERO = ("link_bytes_s", "network_bytes_s", "price_usd_h")


def read_machines(path: Path) -> dict[str, Machine]:
    """Machines of a TOML file: a table for each, named as the machine, with the fields of `Machine`.

    Raises:
        ConfigError: The file cannot be read, or a table lacks a value or has a wrong one; all problems together.
    """
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"--hardware {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--hardware {path} is no TOML: {error}") from error
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
    values: dict[str, Any] = {"kind": str(table.get("kind", "own")), "price_note": str(table.get("price_note", path))}
    for key, number in _NUMBERS.items():
        value = table.get(key)
        if value is None and key == "price_usd_h":
            values["price_note"] = f"{path} has no price_usd_h for {name}"
        elif value is None:
            problems.append(Problem(f"{name}.{key}", "missing, and has no default", str(path)))
        elif isinstance(value, bool) or not isinstance(value, int | float) or not _fits(key, value):
            problems.append(Problem(f"{name}.{key}", f"{value!r} is no number that a machine can have", str(path)))
        else:
            values[key] = number(value)
    if values.get("devices", 1) > 1 and values.get("link_bytes_s") == 0:
        problems.append(Problem(f"{name}.link_bytes_s", "0, but the machine has several devices", str(path)))
    if len(problems) > before:
        return None
    return Machine(name=name, sources=dict.fromkeys(values, str(path)), **values)


def _fits(key: str, value: float) -> bool:
    return value < float("inf") and (value > 0 or (value == 0 and key in _MAY_BE_ZERO))
