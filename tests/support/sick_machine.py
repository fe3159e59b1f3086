"""A folder and programs that stand for a trn1.32xlarge or a p5.48xlarge, and that can be made sick.

The programs print what the documentation of each shows, in its form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxtrain.tools.doctor.finding import Host

FI_INFO = """\
provider: efa
    fabric: efa
    domain: {name}-{kind}
    version: 120.0
    type: FI_EP_{type}
    protocol: FI_PROTO_EFA
"""

NCCOM = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
        1024             256     fp32       15.86           0.06           0.12
    33554432         8388608     fp32         768          40.69          78.80
Avg bus bandwidth:      39.4600GB/s
"""


def neuron_ls(chips: int = 16, held: dict[int, list[tuple[int, str]]] | None = None) -> str:
    """Output of `neuron-ls --json-output` on a trn1."""
    rows: list[dict[str, Any]] = []
    for chip in range(chips):
        processes = [
            {"pid": pid, "command": command, "neuron_runtime_version": "2.0.0"}
            for pid, command in (held or {}).get(chip, [])
        ]
        row = {"neuron_device": chip, "bdf": f"0000:{chip:02x}:1e.0", "cpu_affinity": "0-63", "numa_node": "0"}
        row |= {"connected_to": [(chip + 1) % 16], "nc_count": 2, "memory_size": 34359738368}
        rows.append({**row, "neuroncore_ids": [2 * chip, 2 * chip + 1], "neuron_processes": processes})
    return json.dumps(rows, indent=4)


def fi_info(devices: int = 8) -> str:
    """Output of `fi_info -p efa`, with two entries for each device."""
    kinds = (("rdm", "RDM"), ("dgrm", "DGRAM"))
    return "".join(FI_INFO.format(name=f"rdmap{16 + n}s27", kind=k, type=t) for n in range(devices) for k, t in kinds)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        self.bin.mkdir(parents=True)
        (self.root / "dev/shm").mkdir(parents=True)
        (self.root / "sys").mkdir()
        (self.root / "proc").mkdir()

    @property
    def host(self) -> Host:
        return Host(self.root, str(self.bin))

    def file(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def program(self, name: str, text: str, code: int = 0) -> None:
        """Write a program that prints a text and ends with a code."""
        output = self.bin / f"{name}.out"
        output.write_text(text, encoding="ascii")
        program = self.bin / name
        program.write_text(f"#!/bin/sh\ncat {output}\nexit {code}\n", encoding="ascii")
        program.chmod(0o755)

    def process(self, pid: int, parent: int) -> None:
        self.file(f"/proc/{pid}/stat", f"{pid} (python (x) y) S {parent} 1 1 0 -1")


def trainium(folder: Path) -> Machine:
    """A healthy trn1.32xlarge of Neuron SDK 2.28."""
    machine = Machine(folder)
    machine.file("/sys/devices/virtual/dmi/id/product_name", "trn1.32xlarge\n")
    machine.file("/sys/module/neuron/version", "2.26.10.0\n")
    for chip in range(16):
        at = f"/sys/devices/virtual/neuron_device/neuron{chip}"
        for counter in ("mem_ecc_uncorrected", "sram_ecc_uncorrected", "mem_ecc_repairable_uncorrected"):
            machine.file(f"{at}/stats/hardware/{counter}/total", "0\n")
            machine.file(f"{at}/stats/hardware/{counter}/present", "0\n")
    machine.program("neuron-ls", neuron_ls())
    machine.program("fi_info", fi_info())
    machine.program("dpkg-query", "2.30.51.0-fe3d0d3f7")
    machine.program("nccom-test", NCCOM)
    machine.program("chronyc", "A9FEA97B,169.254.169.123,4,1763800000.1,0.000012,0.00001,0,1,0,0,0,0,16,Normal")
    return machine


SMI = """#!/bin/sh
case "$1" in
--query-gpu=name,compute_cap) echo "{capabilities}" ;;
--query-gpu=index,uuid) for i in 0 1 2 3 4 5 6 7; do echo "$i, GPU-$i"; done ;;
--query-gpu=*) for i in {present}; do echo "$i, {ecc}"; done ;;
*) printf '%s' '{processes}' ;;
esac
"""


def gpus(
    folder: Path,
    present: str = "0 1 2 3 4 5 6 7",
    ecc: str = "0",
    processes: str = "",
    capabilities: str = "NVIDIA H100 80GB HBM3, 9.0",
) -> Machine:
    machine = Machine(folder)
    machine.file("/sys/devices/virtual/dmi/id/product_name", "p5.48xlarge\n")
    machine.program("nvidia-smi", "")
    text = SMI.format(present=present, ecc=ecc, processes=processes, capabilities=capabilities)
    (machine.bin / "nvidia-smi").write_text(text, encoding="ascii")
    machine.program("fi_info", fi_info(32))
    return machine
