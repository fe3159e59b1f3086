"""Trainium instance types, and detection of this machine's type; importable without torch.

An instance type outside the table is described by the Neuron driver, which names the kind of chip and lists every chip.

Source: tools/neuron-sys-tools/neuron-sysfs-user-guide.rst of https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a,
for the driver's files.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nxtrain.common.machines import INSTANCE_TYPES, MACHINES, Machine

SYS = Path("/sys")
"""Root of sysfs, in which Linux describes its devices."""

PRODUCT_NAME = Path("devices/virtual/dmi/id/product_name")
"""File in sysfs with the instance type of an EC2 machine, as https://github.com/aws/aws-ofi-nccl reads it."""

CHIPS = Path("devices/virtual/neuron_device")
"""Folder in sysfs in which the Neuron driver has a folder `neuron<n>` for each chip."""

EFA = Path("class/infiniband")
"""Folder in sysfs with an entry for each EFA network device."""


INSTANCES = {name: machine for name, machine in INSTANCE_TYPES.items() if machine.target}
"""Instance types with Trainium chips, by name."""

_CHIPS = {"trn2": MACHINES["trn2.48xlarge"], "trn3": MACHINES["trn3-gen1-ultraserver"]}
"""One machine per kind of chip, by the prefix of its instance names; the template for unknown instance types."""

FIRST_GENERATION = ("trn1", "trn1n")
"""Compiler targets of first-generation Trainium, which nxtrain supports through PyTorch/XLA only."""


def this_machine(root: Path = SYS) -> Machine | None:
    """Return the instance type of this machine, from `INSTANCES` or the Neuron driver; None without known chips.

    Args:
        root: Root of sysfs.
    """
    product = _read(root / PRODUCT_NAME)
    return INSTANCES.get(product) or _described(root, product)


def chip_kind(name: str) -> str:
    """Return the kind of Trainium chip by the name of an instance or device, such as `trn3`; empty if unknown."""
    return next((kind for kind in _CHIPS if name.lower().startswith(kind)), "")


def _described(root: Path, product: str) -> Machine | None:
    """Describe an instance type outside the table from the driver's files; None if the driver shows no known chips.

    Trn3 needs this: AWS publishes the family `Trn3pds`, but no sizes.
    """
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
