"""Hardware table of machines with accelerators, read from `machines.toml`; importable without torch.

The file has the source of every value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GB = 10**9
GIB = 1 << 30
GIGABIT = 10**9 / 8

UNITS = {"GB": GB, "GiB": GIB, "GB/s": 1e9, "GiB/s": 2.0**30, "Gbit/s": GIGABIT, "TFLOP/s": 1e12, "USD/h": 1}

NEURON = "aws.amazon.com/neuron"
"""Kubernetes resource name of a Trainium chip, as registered by the Neuron device plugin."""

GPU = "nvidia.com/gpu"
"""Kubernetes resource name of a GPU, as registered by NVIDIA's device plugin."""

PRICED = "on demand, N. Virginia, 2025-02 (AWS slides on foundation models)"
UNPRICED = "no price is recorded for this machine; give one with --price"


@dataclass(frozen=True)
class Machine:
    """Hardware data of one machine type. An unknown machine has only a name, and no accelerators.

    Args:
        name: Name of the machine type.
        kind: Name of the chip, which selects the constants of `nxtrain.plan.speed`.
        target: The Neuron compiler's name of a Trainium chip; empty for other chips.
        accelerators: Number of GPUs or Trainium chips.
        devices: Ranks per machine: GPUs, or logical NeuronCores.
        physical_cores: Physical NeuronCores of each logical NeuronCore.
        device_bytes: Bytes of device memory of one rank.
        device_flops: Dense bfloat16 operations per second of one rank.
        float8_flops: Dense float8 operations per second of one rank; 0 if unknown.
        memory_bytes_s: Bandwidth of the device memory of one rank, in bytes per second.
        link_bytes_s: Bandwidth of one rank to other ranks of its machine, in bytes per second and direction; 0 for a
            machine with one device.
        network_bytes_s: Bandwidth of the machine's network for collectives, in bytes per second; 0 if machines cannot
            train together.
        efa_devices: EFA devices for collectives between machines; 0 if machines cannot train together over EFA.
        host_bytes: Bytes of host memory.
        host_threads: Hardware threads of the host.
        price_usd_h: On-demand price in USD per hour; None if unknown.
        price_note: Date and source of the price, or the reason for its absence.
        measured: The values were measured on the machine, since its type is not in the table.
    """

    name: str
    kind: str = ""
    target: str = ""
    accelerators: int = 0
    devices: int = 0
    physical_cores: int = 1
    device_bytes: int = 0
    device_flops: float = 0.0
    float8_flops: float = 0.0
    memory_bytes_s: float = 0.0
    link_bytes_s: float = 0.0
    network_bytes_s: float = 0.0
    efa_devices: int = 0
    host_bytes: int = 0
    host_threads: int = 0
    price_usd_h: float | None = None
    price_note: str = UNPRICED
    measured: bool = False

    @property
    def resource(self) -> str:
        """Kubernetes resource name of the accelerators; empty without accelerators."""
        if not self.accelerators:
            return ""
        if self.target:
            return NEURON
        return GPU


@dataclass(frozen=True)
class GpuPeaks:
    """Peak dense operations per second of a GPU, by number type.

    Args:
        bf16: Peak for bfloat16 and float16.
        tf32: Peak for float32 rounded to TF32 by tensor cores.
        fp32: Peak for float32.
    """

    bf16: float
    tf32: float
    fp32: float


def machine_of(name: str, cells: Mapping[str, Any]) -> Machine:
    """Build a `Machine` from its table in `machines.toml`."""
    values = _values(cells)
    if "price_usd_h" in values:
        values["price_note"] = PRICED
    return Machine(name=name, **values)


def _values(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Strings and numbers of a table in `machines.toml`, with numbers converted to base units."""
    values: dict[str, Any] = {}
    for key, cell in cells.items():
        if isinstance(cell, str):
            values[key] = cell
        else:
            values[key] = cell["value"] * UNITS.get(cell.get("unit"), 1)
    return values


TABLE = Path(__file__).with_name("machines.toml")
_TABLES = tomllib.loads(TABLE.read_text(encoding="utf-8"))

MACHINES = {name: machine_of(name, cells) for name, cells in _TABLES["machines"].items()}
"""All machines of `machines.toml`, by name."""

INSTANCE_TYPES = {name: machine for name, machine in MACHINES.items() if "." in name}
"""Machines that are a single EC2 instance type; an UltraServer consists of several instances."""

ALIASES: dict[str, str] = _TABLES["aliases"]
"""Short names of machines, with the full name of each."""

GPUS = {name: GpuPeaks(**_values(cells)) for name, cells in _TABLES["gpus"].items()}
"""Peak speeds of GPUs, by a part of the GPU's name."""

_OTHER_BOARDS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b")
"""Words in GPU names that mark a variant, or a share of a GPU, with another peak speed."""


def gpu_peaks(name: str) -> GpuPeaks | None:
    """Peak speeds of a GPU by its full name, such as `NVIDIA H100 PCIe`; None if the GPU is not in the table.

    If several rows match, the row with the longest name counts.
    """
    if _OTHER_BOARDS.search(name):
        return None
    matches = [words for words in GPUS if re.search(rf"\b{words}\b", name)]
    return GPUS[max(matches, key=len)] if matches else None
