"""Hardware of AWS's Trainium instances, as data; importable without torch.

Source: pages of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a. Chips, memory and operations per second:
about-neuron/arch/neuron-hardware/trn1-arch.rst, trn2-arch.rst, trainium2.rst. Logical cores:
about-neuron/arch/neuron-features/logical-neuroncore-config.rst. EFA devices: archive/nxd-training/
training-troubleshooting.rst (trn1, trn1n), deploy/eks/dra.rst (trn2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""File with the instance type of a virtual machine of EC2 (https://github.com/aws/aws-ofi-nccl reads it so)."""


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
    """

    name: str
    target: str
    num_cores: int
    physical_cores: int
    core_bytes: int
    core_flops: float
    host_threads: int
    efa_devices: int


def _trn1(name: str, target: str, chips: int, efa_devices: int) -> Instance:
    # A chip: 2 cores, 32 GiB, 190e12 operations per second, 8 threads of the host.
    return Instance(name, target, 2 * chips, 1, 16 * GIB, 190e12 / 2, 8 * chips, efa_devices)


def _trn2(name: str) -> Instance:
    # A chip: 8 cores that act as 4, 96 GiB, 667e12 operations per second, 12 threads of the host.
    return Instance(name, "trn2", 4 * 16, 2, 24 * GIB, 667e12 / 4, 192, 16)


INSTANCES = {
    instance.name: instance
    for instance in (
        _trn1("trn1.2xlarge", "trn1", chips=1, efa_devices=0),
        _trn1("trn1.32xlarge", "trn1", chips=16, efa_devices=8),
        _trn1("trn1n.32xlarge", "trn1n", chips=16, efa_devices=16),
        _trn2("trn2.48xlarge"),
        _trn2("trn2u.48xlarge"),
    )
}
"""Instances by name."""


FIRST_GENERATION = ("trn1", "trn1n")
"""Targets supported through PyTorch/XLA only."""


def this_machine(product_name: Path = PRODUCT_NAME) -> Instance | None:
    """Instance of this machine; None if it is not in `INSTANCES`."""
    try:
        name = product_name.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return INSTANCES.get(name)
