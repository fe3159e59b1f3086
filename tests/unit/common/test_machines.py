"""Every value of `machines.toml`, held against figures that vendors publish for whole machines or boards."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from nxtrain.common.machines import ALIASES, GPUS, INSTANCE_TYPES, MACHINES, TABLE, UNITS, Machine, gpu_peaks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GB, GIB = 10**9, 1 << 30
FILE: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Published:
    """Figures of a machine as its vendor gives them.

    Args:
        ranks: GPUs, or logical NeuronCores.
        memory_bytes: Device memory of the machine.
        teraflops: Dense bf16 operations of the machine per second.
        memory_gb_s: Bandwidth of the device memory of the machine.
        link_gb_s: Bandwidth of a rank's links in one direction.
        network_gbit_s: Bandwidth for collectives; 0 for machines that train alone.
        host_gib: Memory of the host.
        vcpus: Hardware threads of the host.
        chips: GPUs, or Trainium chips.
        efa_devices: Network devices for collectives; 0 where machines train alone, or are not instances.
        price_usd_h: Price on demand; None: not in the source.
        kind: Chip whose constants of speed the machine has.
        target: The compiler's name of the chip; empty: a GPU.
        physical_cores: Physical cores of a rank.
    """

    ranks: int
    memory_bytes: float
    teraflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gbit_s: float
    host_gib: int
    vcpus: int
    chips: int
    efa_devices: int
    price_usd_h: float | None = None
    kind: str = field(kw_only=True)
    target: str = field(default="", kw_only=True)
    physical_cores: int = field(default=1, kw_only=True)


_TRN1: Mapping[str, Any] = {"kind": "trn1", "target": "trn1"}
_TRN1_16: Mapping[str, Any] = {
    "memory_bytes": 512 * GIB,
    "teraflops": 3040,
    "memory_gb_s": 13_120 * GIB / GB,
    "host_gib": 512,
    "vcpus": 128,
    "chips": 16,
    "kind": "trn1",
}
_TRN2: Mapping[str, Any] = {"kind": "trn2", "target": "trn2", "physical_cores": 2}
_TRN2_16: Mapping[str, Any] = {
    "memory_bytes": 1536 * GIB,
    "teraflops": 16 * 667,
    "memory_gb_s": 46_400,
    "host_gib": 2048,
    "vcpus": 192,
    "chips": 16,
    "efa_devices": 16,
    **_TRN2,
}
_TRN3: Mapping[str, Any] = {"kind": "trn3", "target": "trn3", "physical_cores": 2}
_A100: Mapping[str, Any] = {"kind": "a100"}
_HOPPER: Mapping[str, Any] = {"kind": "hopper"}
_A10G: Mapping[str, Any] = {"kind": "a10g"}
_L40S: Mapping[str, Any] = {"kind": "l40s"}

PUBLISHED = {
    # aws.amazon.com/ec2/instance-types/trn1 and trn1-arch.rst of aws-neuron-sdk: 16 chips of two ranks.
    "trn1.2xlarge": Published(2, 32 * GIB, 190, 820 * GIB / GB, 192 * GIB / GB, 0, 32, 8, 1, 0, **_TRN1),
    "trn1.32xlarge": Published(
        32, **_TRN1_16, link_gb_s=192 * GIB / GB, network_gbit_s=800, efa_devices=8, price_usd_h=21.50, target="trn1"
    ),
    "trn1n.32xlarge": Published(
        32, **_TRN1_16, link_gb_s=384 * GIB / GB, network_gbit_s=1600, efa_devices=16, target="trn1n"
    ),
    # aws.amazon.com/ec2/instance-types/trn2 and trn2-arch.rst: chips of 2.9 TB/s and 1 TB/s of links, of four ranks.
    "trn2.3xlarge": Published(4, 96 * GIB, 667, 2900, 256, 0, 128, 12, 1, 0, **_TRN2),
    "trn2.48xlarge": Published(64, **_TRN2_16, link_gb_s=256, network_gbit_s=3200),
    "trn2u.48xlarge": Published(64, **_TRN2_16, link_gb_s=256, network_gbit_s=3200),
    "trn2-ultraserver": Published(256, 6144 * GIB, 64 * 667, 185_600, 256, 12_800, 8192, 768, 64, 0, **_TRN2),
    # trn3-arch.rst: 314 and 706 TB/s, 9 and 20 TB of memory, 2 TiB/s of links for each chip.
    "trn3-gen1-ultraserver": Published(
        256, 64 * 144 * GIB, 64 * 671, 313_600, 512 * GIB / GB, 12_800, 8192, 768, 64, 0, **_TRN3
    ),
    "trn3-gen2-ultraserver": Published(
        576, 144 * 144 * GIB, 144 * 671, 705_600, 512 * GIB / GB, 28_800, 27_648, 2304, 144, 0, **_TRN3
    ),
    # aws.amazon.com/ec2/instance-types/p4: A100 of 40 and 80 GB, NVSwitch of 600 GB/s in both directions. Devices for
    # collectives, here and below: efa-acc-inst-types.html of the user guide of EC2.
    "p4d.24xlarge": Published(8, 320 * GIB, 8 * 312, 8 * 1555, 300, 400, 1152, 96, 8, 4, 32.77, **_A100),
    "p4de.24xlarge": Published(8, 640 * GIB, 8 * 312, 8 * 2039, 300, 400, 1152, 96, 8, 4, 40.96, **_A100),
    # aws.amazon.com/ec2/instance-types/p5: H100 of 80 GB and H200 of 141 GB, NVSwitch of 900 GB/s in both directions.
    "p5.48xlarge": Published(8, 640 * GIB, 8 * 989, 8 * 3350, 450, 3200, 2048, 192, 8, 32, 98.32, **_HOPPER),
    "p5e.48xlarge": Published(8, 1128 * GB, 8 * 989, 8 * 4800, 450, 3200, 2048, 192, 8, 32, **_HOPPER),
    "p5en.48xlarge": Published(8, 1128 * GB, 8 * 989, 8 * 4800, 450, 3200, 2048, 192, 8, 16, **_HOPPER),
    # aws.amazon.com/ec2/instance-types/g5 and g6e: no NVLink, PCIe 4.0 x16 of 32 GB/s in one direction.
    "g5.2xlarge": Published(1, 24 * GIB, 70, 600, 0, 10, 32, 8, 1, 0, **_A10G),
    "g5.12xlarge": Published(4, 96 * GIB, 280, 2400, 32, 40, 192, 48, 4, 1, **_A10G),
    "g5.48xlarge": Published(8, 192 * GIB, 560, 4800, 32, 100, 768, 192, 8, 1, **_A10G),
    "g6e.2xlarge": Published(1, 48 * GB, 362, 864, 0, 20, 64, 8, 1, 0, **_L40S),
    "g6e.12xlarge": Published(4, 192 * GB, 1448, 3456, 32, 100, 384, 48, 4, 1, **_L40S),
    "g6e.48xlarge": Published(8, 384 * GB, 2896, 6912, 32, 400, 1536, 192, 8, 4, **_L40S),
}


FLOAT8 = {"hopper": 3958e12 / 2, "l40s": 733e12}
"""Dense float8 operations of a GPU by its data sheet, half of those of sparse matrices."""


def differing(machine: Machine, published: Published) -> list[str]:
    """Fields of a machine that are not the published figures."""
    ranks = published.ranks
    expected: dict[str, Any] = {
        "kind": published.kind,
        "target": published.target,
        "accelerators": published.chips,
        "devices": ranks,
        "physical_cores": published.physical_cores,
        "device_bytes": published.memory_bytes / ranks,
        "device_flops": published.teraflops * 1e12 / ranks,
        "float8_flops": FLOAT8.get(published.kind, 0.0),
        "memory_bytes_s": published.memory_gb_s * GB / ranks,
        "link_bytes_s": published.link_gb_s * GB,
        "network_bytes_s": published.network_gbit_s * 1e9 / 8,
        "efa_devices": published.efa_devices,
        "host_bytes": published.host_gib * GIB,
        "host_threads": published.vcpus,
        "price_usd_h": published.price_usd_h,
    }
    assert expected.keys() == {item.name for item in fields(Machine)} - {"name", "price_note", "measured"}
    return [name for name, value in expected.items() if not agrees(getattr(machine, name), value)]


def agrees(value: Any, published: Any) -> bool:
    if isinstance(value, int | float) and isinstance(published, int | float):
        return abs(value - published) <= 1e-9 * published
    return bool(value == published)


CELLS = [(table, name, key) for table in ("machines", "gpus") for name in FILE[table] for key in FILE[table][name]]


def test_every_machine_has_published_figures() -> None:
    assert PUBLISHED.keys() == MACHINES.keys()
    assert [name for name in MACHINES if name not in INSTANCE_TYPES] == [
        "trn2-ultraserver", "trn3-gen1-ultraserver", "trn3-gen2-ultraserver",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_cells_are_the_published_figures(name: str) -> None:
    assert differing(MACHINES[name], PUBLISHED[name]) == []


@pytest.mark.parametrize(("table", "name", "key"), CELLS)
def test_every_number_has_a_unit_and_a_source(table: str, name: str, key: str) -> None:
    cell = FILE[table][name][key]
    if isinstance(cell, str):
        assert key in ("kind", "target")
        return
    assert cell.keys() <= {"value", "unit", "source"}
    assert ("unit" in cell) == bool(re.search(r"bytes|flops|_s$|_usd_h$|^(bf16|tf32|fp32)$", key))
    assert cell.get("unit", "GB") in UNITS
    assert re.match(r"https://|AWS slides", FILE["sources"][cell["source"]])


def test_every_source_is_used() -> None:
    used = {
        cell["source"]
        for table in ("machines", "gpus")
        for row in FILE[table].values()
        for cell in row.values()
        if isinstance(cell, dict)
    }
    assert used == FILE["sources"].keys()


def test_prices_have_a_date_and_other_machines_the_reason_for_their_absence() -> None:
    for machine in MACHINES.values():
        wanted = (
            r"2025-02" if machine.price_usd_h else r"^no price is recorded for this machine; give one with --price$"
        )
        assert re.search(wanted, machine.price_note)


def test_short_names_are_of_machines() -> None:
    assert set(ALIASES.values()) <= MACHINES.keys()


def test_accelerators_have_the_names_of_kubernetes() -> None:
    resources = {machine.resource for machine in MACHINES.values() if machine.target}
    assert resources == {"aws.amazon.com/neuron"}
    assert {machine.resource for machine in MACHINES.values() if not machine.target} == {"nvidia.com/gpu"}
    assert Machine("m5.large").resource == ""


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_gpu_has_the_row_with_the_longest_name(name: str, row: str) -> None:
    assert gpu_peaks(name) == GPUS[row]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        *(f"NVIDIA GeForce RTX {board}" for board in ("3090 Ti", "4090 Laptop GPU", "4090 D")),
        *("NVIDIA RTX A1000", "NVIDIA H800", "Tesla V100-SXM2-16GB"),
    ],
)
def test_a_gpu_beside_the_table_has_no_peak(name: str) -> None:
    assert gpu_peaks(name) is None


def test_float32_is_no_faster_than_its_rounding_nor_that_than_bfloat16() -> None:
    assert all(peaks.fp32 <= peaks.tf32 <= peaks.bf16 for peaks in GPUS.values())
    # Tensor cores multiply twice as many bfloat16 numbers as rounded float32 ones.
    assert all(1.9 <= peaks.bf16 / peaks.tf32 <= 2.1 for peaks in GPUS.values())


def test_gpus_of_machines_have_the_peak_of_their_row() -> None:
    for name, machine in MACHINES.items():
        row = {"a100": "A100", "hopper": "H100", "a10g": "A10G", "l40s": "L40S"}.get(machine.kind)
        assert machine.target or (row is not None and machine.device_flops == GPUS[row].bf16), name
