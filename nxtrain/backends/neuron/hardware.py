"""Machines with Trainium chips, and the machine that this one is; importable without torch.

An instance type outside the table is made of chips of a known kind: the driver names the kind and shows every chip.

Source: tools/neuron-sys-tools/neuron-sysfs-user-guide.rst of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a,
for the driver's files.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nxtrain.common.machines import INSTANCE_TYPES, MACHINES, Machine

SYS = Path("/sys")
"""Root of the system's description of its devices."""

PRODUCT_NAME = Path("devices/virtual/dmi/id/product_name")
"""File with the instance type of a virtual machine of EC2 (https://github.com/aws/aws-ofi-nccl reads it so)."""

CHIPS = Path("devices/virtual/neuron_device")
"""Folder with a folder `neuron<n>` of the driver for each chip."""

EFA = Path("class/infiniband")
"""Folder with an entry for each network device for collectives."""


INSTANCES = {name: machine for name, machine in INSTANCE_TYPES.items() if machine.target}
"""Instances with Trainium chips by name."""

_CHIPS = {"trn2": MACHINES["trn2.48xlarge"], "trn3": MACHINES["trn3-gen1-ultraserver"]}
"""A machine of each kind of chip, by the beginning of the names of its instances."""

FIRST_GENERATION = ("trn1", "trn1n")
"""Targets supported through PyTorch/XLA only."""


def this_machine(root: Path = SYS) -> Machine | None:
    """Instance of this machine: from `INSTANCES`, or as its driver describes it; None if no chip is known.

    Args:
        root: Folder of the system's description of its devices.
    """
    product = _read(root / PRODUCT_NAME)
    return INSTANCES.get(product) or _described(root, product)


def chip_kind(name: str) -> str:
    """Kind of the chips of an instance or device by its name, such as `trn3`; empty if unknown."""
    return next((kind for kind in _CHIPS if name.lower().startswith(kind)), "")


def _described(root: Path, product: str) -> Machine | None:
    """Instance that the driver's files describe, such as a Trn3: AWS names the family `Trn3pds`, and no sizes."""
    chips = len(list((root / CHIPS).glob("neuron[0-9]*")))
    said = _read(root / CHIPS / "neuron0/info/architecture/instance_type")
    kind = chip_kind(product) or chip_kind(said)
    if not kind or not chips:
        return None
    efa_devices = len(list((root / EFA).glob("*")))
    like = _CHIPS[kind]
    return replace(
        like,
        name=product or kind,
        accelerators=chips,
        devices=chips * like.devices // like.accelerators,
        host_threads=os.cpu_count() or chips,
        efa_devices=efa_devices,
        measured=True,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
