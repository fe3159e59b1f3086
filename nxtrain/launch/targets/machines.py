"""Instance types as clusters see them: accelerators, network devices, and the resources of Kubernetes.

Sources: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (network cards),
https://aws.amazon.com/ec2/instance-types (accelerators), `nxtrain.backends.neuron.hardware` (trn1, trn2).
"""

from __future__ import annotations

from dataclasses import dataclass

from nxtrain.backends.neuron.hardware import INSTANCES, Instance

NEURON = "aws.amazon.com/neuron"
"""Kubernetes' resource of a Trainium chip, from the Neuron device plugin."""

GPU = "nvidia.com/gpu"
"""Kubernetes' resource of a GPU, from NVIDIA's device plugin."""

EFA = "vpc.amazonaws.com/efa"
"""Kubernetes' resource of an EFA device, from the EFA device plugin."""

_CHIP_CORES = {"trn1": 2, "trn1n": 2, "trn2": 8}
"""Physical cores of a chip."""


@dataclass(frozen=True)
class TargetMachine:
    """An instance type.

    Args:
        instance: EC2's name.
        resource: Kubernetes' resource of its accelerators; empty: it has none.
        devices: Number of accelerators.
        ranks: Ranks that use all of them.
        efa_devices: EFA devices for collectives between machines; 0: machines cannot train together over EFA.
    """

    instance: str
    resource: str
    devices: int
    ranks: int
    efa_devices: int

    @property
    def resources(self) -> dict[str, int | str]:
        """Kubernetes' limits of a pod that has the machine to itself, but for processors and memory."""
        limits: dict[str, int | str] = {}
        if self.resource:
            limits[self.resource] = self.devices
        if self.efa_devices:
            limits |= {EFA: self.efa_devices, "hugepages-2Mi": "5120Mi"}  # libfabric's buffers
        return limits


def _neuron(instance: Instance) -> TargetMachine:
    devices = instance.num_cores * instance.physical_cores // _CHIP_CORES[instance.target]
    return TargetMachine(instance.name, NEURON, devices, instance.num_cores, instance.efa_devices)


def _gpus(instance: str, devices: int, efa_devices: int) -> TargetMachine:
    return TargetMachine(instance, GPU, devices, devices, efa_devices)


MACHINES = {
    machine.instance: machine
    for machine in (
        *map(_neuron, INSTANCES.values()),
        _gpus("p4d.24xlarge", 8, 4),
        _gpus("p4de.24xlarge", 8, 4),
        _gpus("p5.48xlarge", 8, 32),
        _gpus("p5e.48xlarge", 8, 32),
        _gpus("p5en.48xlarge", 8, 16),
        _gpus("g5.2xlarge", 1, 0),
        _gpus("g5.12xlarge", 4, 1),
        _gpus("g5.48xlarge", 8, 1),
        _gpus("g6e.2xlarge", 1, 0),
        _gpus("g6e.12xlarge", 4, 1),
        _gpus("g6e.48xlarge", 8, 4),
    )
}
"""Instance types with accelerators, by name."""
