"""Every cell of the table of machines, held against figures that vendors publish for whole machines or boards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from nxtrain.plan.hardware import MACHINES, Machine

GB, GIB = 10**9, 1 << 30


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
        price_usd_h: Price on demand; None: not in the source.
    """

    ranks: int
    memory_bytes: float
    teraflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gbit_s: float
    host_gib: int
    vcpus: int
    price_usd_h: float | None = None


_TRN1: Mapping[str, Any] = {
    "memory_bytes": 512 * GIB,
    "teraflops": 3040,
    "memory_gb_s": 13_120 * GIB / GB,
    "host_gib": 512,
    "vcpus": 128,
}
_TRN2: Mapping[str, Any] = {
    "memory_bytes": 1536 * GIB,
    "teraflops": 16 * 667,
    "memory_gb_s": 46_400,
    "host_gib": 2048,
    "vcpus": 192,
}

PUBLISHED = {
    # aws.amazon.com/ec2/instance-types/trn1 and trn1-arch.rst of aws-neuron-sdk: 16 chips of two ranks.
    "trn1.2xlarge": Published(2, 32 * GIB, 190, 820 * GIB / GB, 192 * GIB / GB, 0, 32, 8),
    "trn1.32xlarge": Published(32, **_TRN1, link_gb_s=192 * GIB / GB, network_gbit_s=800, price_usd_h=21.50),
    "trn1n.32xlarge": Published(32, **_TRN1, link_gb_s=384 * GIB / GB, network_gbit_s=1600),
    # aws.amazon.com/ec2/instance-types/trn2 and trn2-arch.rst: chips of 2.9 TB/s and 1 TB/s of links, of four ranks.
    "trn2.3xlarge": Published(4, 96 * GIB, 667, 2900, 256, 0, 128, 12),
    "trn2.48xlarge": Published(64, **_TRN2, link_gb_s=256, network_gbit_s=3200),
    "trn2u.48xlarge": Published(64, **_TRN2, link_gb_s=256, network_gbit_s=3200),
    "trn2-ultraserver": Published(256, 6144 * GIB, 64 * 667, 185_600, 256, 12_800, 8192, 768),
    # trn3-arch.rst: 314 and 706 TB/s, 9 and 20 TB of memory, 2 TiB/s of links for each chip.
    "trn3-gen1-ultraserver": Published(256, 64 * 144 * GIB, 64 * 671, 313_600, 512 * GIB / GB, 12_800, 8192, 768),
    "trn3-gen2-ultraserver": Published(576, 144 * 144 * GIB, 144 * 671, 705_600, 512 * GIB / GB, 28_800, 27_648, 2304),
    # aws.amazon.com/ec2/instance-types/p4: A100 of 40 and 80 GB, NVSwitch of 600 GB/s in both directions.
    "p4d.24xlarge": Published(8, 320 * GIB, 8 * 312, 8 * 1555, 300, 400, 1152, 96, 32.77),
    "p4de.24xlarge": Published(8, 640 * GIB, 8 * 312, 8 * 2039, 300, 400, 1152, 96, 40.96),
    # aws.amazon.com/ec2/instance-types/p5: H100 of 80 GB and H200 of 141 GB, NVSwitch of 900 GB/s in both directions.
    "p5.48xlarge": Published(8, 640 * GIB, 8 * 989, 8 * 3350, 450, 3200, 2048, 192, 98.32),
    "p5e.48xlarge": Published(8, 1128 * GB, 8 * 989, 8 * 4800, 450, 3200, 2048, 192),
    "p5en.48xlarge": Published(8, 1128 * GB, 8 * 989, 8 * 4800, 450, 3200, 2048, 192),
    # aws.amazon.com/ec2/instance-types/g5 and g6e: no NVLink, PCIe 4.0 x16 of 32 GB/s in one direction.
    "g5.2xlarge": Published(1, 24 * GIB, 70, 600, 0, 10, 32, 8),
    "g5.12xlarge": Published(4, 96 * GIB, 280, 2400, 32, 40, 192, 48),
    "g5.48xlarge": Published(8, 192 * GIB, 560, 4800, 32, 100, 768, 192),
    "g6e.2xlarge": Published(1, 48 * GB, 362, 864, 0, 20, 64, 8),
    "g6e.12xlarge": Published(4, 192 * GB, 1448, 3456, 32, 100, 384, 48),
    "g6e.48xlarge": Published(8, 384 * GB, 2896, 6912, 32, 400, 1536, 192),
}


def differing(machine: Machine, published: Published) -> list[str]:
    """Fields of a machine that are more than a thousandth from the published figures."""
    ranks = published.ranks
    expected: dict[str, float | None] = {
        "devices": ranks,
        "device_bytes": published.memory_bytes / ranks,
        "device_flops": published.teraflops * 1e12 / ranks,
        "memory_bytes_s": published.memory_gb_s * GB / ranks,
        "link_bytes_s": published.link_gb_s * GB,
        "network_bytes_s": published.network_gbit_s * 1e9 / 8,
        "host_bytes": published.host_gib * GIB,
        "host_threads": published.vcpus,
        "price_usd_h": published.price_usd_h,
    }
    assert expected.keys() == {each.name for each in fields(Machine)} - {"name", "kind", "price_note", "sources"}
    return [name for name, value in expected.items() if not agrees(getattr(machine, name), value)]


def agrees(value: float | None, published: float | None) -> bool:
    if value is None or published is None:
        return value == published
    return abs(value - published) <= 1e-3 * published


def test_every_machine_has_published_figures() -> None:
    assert PUBLISHED.keys() == MACHINES.keys()


@pytest.mark.parametrize("name", MACHINES)
def test_cells_are_the_published_figures(name: str) -> None:
    assert differing(MACHINES[name], PUBLISHED[name]) == []


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [0.5, 1.01, 1.2, 2])
def test_a_changed_cell_is_noticed(name: str, factor: float) -> None:
    machine = MACHINES[name]
    cells = {each.name: getattr(machine, each.name) for each in fields(Machine)}
    numbers = {key: value for key, value in cells.items() if isinstance(value, int | float) and value}
    for key, value in numbers.items():
        changed: Any = {key: max(value + 1, round(value * factor)) if key == "devices" else value * factor}
        assert differing(replace(machine, **changed), PUBLISHED[name]) == [key]
