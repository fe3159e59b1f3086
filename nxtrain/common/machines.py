"""Machines with accelerators, from `machines.toml`, which has the source of every value; importable without torch."""

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
"""Kubernetes' resource of a Trainium chip, from the Neuron device plugin."""

GPU = "nvidia.com/gpu"
"""Kubernetes' resource of a GPU, from NVIDIA's device plugin."""

PRICED = "on demand, N. Virginia, 2025-02 (AWS slides on foundation models)"
UNPRICED = "no price is recorded for this instance: AWS sells it by Capacity Block or region; give one with --price"


@dataclass(frozen=True)
class Machine:
    """One kind of machine; an unknown machine has only a name, and no accelerators.

    Args:
        kind: Chip, which selects the constants of `nxtrain.plan.speed`.
        target: The compiler's name of a Trainium chip; empty: another chip.
        accelerators: GPUs, or Trainium chips.
        devices: Ranks per machine: GPUs, or logical NeuronCores.
        physical_cores: Physical cores of each logical NeuronCore.
        device_bytes: Device memory of one rank.
        device_flops: Dense bfloat16 operations per second of one rank.
        float8_flops: Dense float8 operations per second of one rank; 0: unknown.
        memory_bytes_s: Bandwidth of the device memory of one rank.
        link_bytes_s: Bandwidth of one rank to the others of its machine, one direction; 0: the machine has one device.
        network_bytes_s: Bandwidth of the machine's network for collectives; 0: machines cannot train together.
        efa_devices: EFA devices for collectives between machines; 0: machines cannot train together over EFA.
        price_usd_h: On-demand price of an hour; None: unknown.
        price_note: Date and source of the price, or the reason for its absence.
        measured: The machine described itself; its type is not in the table.
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
        """Kubernetes' resource of the accelerators; empty: the machine has none."""
        if not self.accelerators:
            return ""
        if self.target:
            return NEURON
        return GPU


@dataclass(frozen=True)
class GpuPeaks:
    """Dense operations per second of a GPU, by the type of the numbers that are multiplied.

    Args:
        bf16: bfloat16 and float16.
        tf32: float32 as tensor cores round it.
        fp32: float32.
    """

    bf16: float
    tf32: float
    fp32: float


def machine_of(name: str, cells: Mapping[str, Any]) -> Machine:
    """Machine of a table of `machines.toml`."""
    values = _values(cells)
    if "price_usd_h" in values:
        values["price_note"] = PRICED
    return Machine(name=name, **values)


def _values(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Words and numbers of a table, the numbers in basic units."""
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
"""Machines by name."""

INSTANCE_TYPES = {name: machine for name, machine in MACHINES.items() if "." in name}
"""Machines that are one instance type of EC2; an UltraServer is several."""

ALIASES: dict[str, str] = _TABLES["aliases"]
"""Short names of machines."""

GPUS = {name: GpuPeaks(**_values(cells)) for name, cells in _TABLES["gpus"].items()}
"""Peak speeds of GPUs, by words in the names of the GPUs."""

_OTHER_BOARDS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b")
"""Words in names of boards, or of shares of a board, whose peak differs from that of the board without the word."""


def gpu_peaks(name: str) -> GpuPeaks | None:
    """Peaks of a GPU by its whole name, such as `NVIDIA H100 PCIe`; None: it is not in the table.

    Of several rows, the one with the longest name counts.
    """
    if _OTHER_BOARDS.search(name):
        return None
    matches = [words for words in GPUS if re.search(rf"\b{words}\b", name)]
    return GPUS[max(matches, key=len)] if matches else None
