"""Hardware of AWS's Trainium instances, as data; importable without torch.

An instance type outside the table is made of chips of a known kind: the driver names the kind and shows every chip.

Source: pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a. Chips, memory and operations per second:
about-neuron/arch/neuron-hardware/trn1-arch.rst, trn2-arch.rst, trainium2.rst, trainium3.rst. Logical cores:
about-neuron/arch/neuron-features/logical-neuroncore-config.rst. EFA devices: archive/nxd-training/
training-troubleshooting.rst (trn1, trn1n), deploy/eks/dra.rst (trn2). The driver's files:
tools/neuron-sys-tools/neuron-sysfs-user-guide.rst. One chip with logical cores of two: torch/get-started/
quickstart-build-first-model.html (trn2.3xlarge) in https://awsdocs-neuron.readthedocs-hosted.com/en/latest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

SYS = Path("/sys")
"""Root of the system's description of its devices."""

PRODUCT_NAME = Path("devices/virtual/dmi/id/product_name")
"""File with the instance type of a virtual machine of EC2 (https://github.com/aws/aws-ofi-nccl reads it so)."""

CHIPS = Path("devices/virtual/neuron_device")
"""Folder with a folder `neuron<n>` of the driver for each chip."""

EFA = Path("class/infiniband")
"""Folder with an entry for each network device for collectives."""


@dataclass(frozen=True)
class Instance:
    """One kind of machine.

    Args:
        name: EC2's name of the instance type.
        target: The compiler's name of the chip.
        num_cores: Logical cores, one for each rank.
        physical_cores: Physical cores in each logical core.
        core_bytes: Device memory per logical core.
        core_flops: Dense bfloat16 operations per second of a logical core.
        host_threads: Hardware threads of the host's processors.
        efa_devices: Network devices for collectives between machines; 0: machines cannot train together.
        measured: The machine described itself; its type is not in `INSTANCES`.
    """

    name: str
    target: str
    num_cores: int
    physical_cores: int
    core_bytes: int
    core_flops: float
    host_threads: int
    efa_devices: int
    measured: bool = False


def _trn1(name: str, target: str, chips: int, efa_devices: int) -> Instance:
    # A chip: 2 cores, 32 GiB, 190e12 operations per second, 8 threads of the host.
    return Instance(name, target, 2 * chips, 1, 16 * GIB, 190e12 / 2, 8 * chips, efa_devices)


@dataclass(frozen=True)
class _Chip:
    """Chip whose eight physical cores act as four logical ones.

    Args:
        target: The compiler's name.
        memory_bytes: Device memory.
        flops: Dense bfloat16 operations per second.
    """

    target: str
    memory_bytes: int
    flops: float

    def instance(self, name: str, chips: int, threads: int, efa_devices: int, *, measured: bool = False) -> Instance:
        """Instance of so many chips."""
        memory_bytes, flops = self.memory_bytes // 4, self.flops / 4
        return Instance(name, self.target, 4 * chips, 2, memory_bytes, flops, threads, efa_devices, measured)


_CHIPS = {"trn2": _Chip("trn2", 96 * GIB, 667e12), "trn3": _Chip("trn3", 144 * GIB, 671e12)}
"""Chips by the beginning of the names of their instances."""


INSTANCES = {
    instance.name: instance
    for instance in (
        _trn1("trn1.2xlarge", "trn1", chips=1, efa_devices=0),
        _trn1("trn1.32xlarge", "trn1", chips=16, efa_devices=8),
        _trn1("trn1n.32xlarge", "trn1n", chips=16, efa_devices=16),
        _CHIPS["trn2"].instance("trn2.3xlarge", 1, 12, 0),
        _CHIPS["trn2"].instance("trn2.48xlarge", 16, 192, 16),
        _CHIPS["trn2"].instance("trn2u.48xlarge", 16, 192, 16),
    )
}
"""Instances by name."""


FIRST_GENERATION = ("trn1", "trn1n")
"""Targets supported through PyTorch/XLA only."""


def this_machine(root: Path = SYS) -> Instance | None:
    """Instance of this machine: from `INSTANCES`, or as its driver describes it; None if no chip is known.

    Args:
        root: Folder of the system's description of its devices.
    """
    product = _read(root / PRODUCT_NAME)
    return INSTANCES.get(product) or _described(root, product)


def chip_kind(name: str) -> str:
    """Kind of the chips of an instance or device by its name, such as `trn3`; empty if unknown."""
    return next((kind for kind in _CHIPS if name.lower().startswith(kind)), "")


def _described(root: Path, product: str) -> Instance | None:
    """Instance that the driver's files describe, such as a Trn3: AWS names the family `Trn3pds`, and no sizes."""
    chips = len(list((root / CHIPS).glob("neuron[0-9]*")))
    said = _read(root / CHIPS / "neuron0/info/architecture/instance_type")
    kind = chip_kind(product) or chip_kind(said)
    if not kind or not chips:
        return None
    efa_devices = len(list((root / EFA).glob("*")))
    return _CHIPS[kind].instance(product or kind, chips, os.cpu_count() or chips, efa_devices, measured=True)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
