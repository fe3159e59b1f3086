"""Checks of accelerators and EFA devices: counts, driver, memory errors, and processes that hold devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nxtrain.common.machines import GPU, NEURON, Machine
from nxtrain.common.text import listed
from nxtrain.tools.doctor.finding import Finding, Host, ToolError, fault, passed
from nxtrain.tools.doctor.outputs import (
    GPU_QUERY,
    PROCESS_QUERY,
    UUID_QUERY,
    Devices,
    Holder,
    ToolOutputError,
    parse_fi_info,
    parse_neuron_ls,
    parse_nvidia_smi,
)

COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
"""Neuron driver's counters of uncorrectable memory errors.

They are files in one folder per chip, whose layout differs by release. Correctable errors have other counters.

Source: tools/neuron-sys-tools/neuron-sysfs-user-guide.rst in https://github.com/aws-neuron/aws-neuron-sdk.
"""

NEURON_SYSFS = "/sys/devices/virtual/neuron_device"

PAIRS = {(2, 29): (2, 25), (2, 30): (2, 26), (2, 31): (2, 27), (2, 32): (2, 28), (2, 33): (2, 29), (2, 34): (2, 30)}
"""Driver version released with each version of the runtime library, for Neuron SDK 2.27 to 2.32.

Source: src/helperscripts/n2-manifest.json in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
"""

REPLACE = "drain the node and have it replaced (scontrol update, kubectl drain, or HyperPod's own replacement)"


def check_devices(
    host: Host, machine: Machine | None, *, needs_all: bool, wanted: tuple[str, str] = ("", "")
) -> Iterator[Finding]:
    """Check the accelerators and EFA devices of a machine.

    Args:
        wanted: Backend of the run that is about to start, and the resource of its devices; both empty if the run
            needs none, or if the devices decide on the backend.
        needs_all: A run is about to start, so any process that holds a device is a fault. Otherwise only processes
            without a parent are.
    """
    try:
        devices = _list_devices(host, machine.resource if machine is not None else wanted[1])
    except (ToolError, ToolOutputError) as error:
        why = "the driver does not answer, and a run would hang or fail at its start"
        yield fault("devices", str(error), why, f"reload the driver or reboot; if that fails, {REPLACE}")
    else:
        yield _count(devices, machine, wanted)
        if devices is not None:
            yield _processes(host, devices.holders, needs_all)
            yield _ecc(host, devices, machine)
    if machine is not None and machine.resource == NEURON:
        yield _pair(host)
    if machine is not None and machine.efa_devices:
        yield _efa(host, machine)


def _list_devices(host: Host, resource: str) -> Devices | None:
    """List the accelerators of a kind, or of any kind; None if neither a tool nor the driver reports any."""
    may_have_chips = resource in ("", NEURON)
    if may_have_chips:
        text = host.run("neuron-ls", "--json-output")
        if text:
            return parse_neuron_ls(text)
    if resource in ("", GPU):
        form = "--format=csv,noheader"
        gpus = host.run("nvidia-smi", f"--query-gpu={GPU_QUERY}", form)
        if gpus:
            uuids = host.run("nvidia-smi", f"--query-gpu={UUID_QUERY}", form) or ""
            processes = host.run("nvidia-smi", f"--query-compute-apps={PROCESS_QUERY}", form) or ""
            return parse_nvidia_smi(gpus, uuids, processes)
    numbers = []
    if may_have_chips:
        names = [path.name.removeprefix("neuron") for path in host.at("/dev").glob("neuron[0-9]*")]
        numbers = sorted(int(name) for name in names if name.isdigit())
    if not numbers:
        return None
    return Devices(tuple(numbers))


def _count(devices: Devices | None, machine: Machine | None, wanted: tuple[str, str]) -> Finding:
    numbers: tuple[int, ...] = ()
    if devices is not None:
        numbers = devices.numbers
    count = len(numbers)
    backend, resource = wanted
    if resource and not count and (machine is None or machine.resource != resource):
        tool = {GPU: "nvidia-smi", NEURON: "neuron-ls"}[resource]
        why = "no rank can start"
        return fault(
            "devices", f"no device for backend.name={backend}", why, f"see {tool}, or set another backend.name"
        )
    if machine is None or not machine.resource:
        return passed("devices", f"{count} accelerators")
    if count != machine.accelerators:
        missing = sorted({*range(machine.accelerators)} - {*numbers})
        what = f"{count} of {machine.accelerators} accelerators of {machine.name}; missing: {listed(missing)}"
        return fault("devices", what, "ranks of the missing ones cannot start", f"reboot once; then {REPLACE}")
    return passed("devices", f"{count} accelerators, as {machine.name} has")


def _processes(host: Host, holders: Sequence[Holder], needs_all: bool) -> Finding:
    stray = []
    for holder in holders:
        fields = host.read(f"/proc/{holder.pid}/stat").rpartition(")")[2].split()
        # A rank has lost its parent if its agent was killed.
        is_orphan = len(fields) > 1 and fields[1] == "1" and holder.pid != 1
        if needs_all or is_orphan:
            stray.append(holder)
    if not holders:
        return passed("processes", "no process holds a device")
    if not stray:
        return passed("processes", f"{len(holders)} processes hold devices")
    pids = " ".join(str(holder.pid) for holder in stray)
    what = "; ".join(
        f"process {holder.pid} ({holder.command}) holds devices {listed(holder.devices)}" for holder in stray
    )
    why = "a run cannot claim these devices, and would fail at its start"
    return fault("processes", what, why, f"end the run that they belong to, or kill {pids}")


def _ecc(host: Host, devices: Devices, machine: Machine | None) -> Finding:
    counts = dict(devices.ecc)
    if machine is None or machine.resource == NEURON:
        for number in devices.numbers:
            for counter in COUNTERS:
                for path in host.at(f"{NEURON_SYSFS}/neuron{number}").rglob(counter):
                    counts[number] = counts.get(number, 0) + _counter_value(path)
    if not counts:
        return passed("ecc", "no counters here")
    bad = {number: count for number, count in counts.items() if count}
    if not bad:
        return passed("ecc", f"no uncorrected memory error on {len(counts)} devices")
    what = "; ".join(f"device {number}: {count} uncorrected memory errors" for number, count in sorted(bad.items()))
    return fault("ecc", what, "weights or gradients may have been changed silently", REPLACE)


def _counter_value(path: Path) -> int:
    """Value of a Neuron driver's error counter; 0 if the counter contains no number.

    A counter is a file, or in some releases a folder with a file `total`.
    """
    if path.is_dir():
        path = path / "total"
    if not path.is_file():
        return 0
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not text.isdecimal():
        return 0
    return int(text)


def _pair(host: Host) -> Finding:
    driver = host.read("/sys/module/neuron/version")
    if not driver:
        fix = "install aws-neuronx-dkms, and load it: modprobe neuron"
        return fault("driver", "the Neuron driver is not loaded", "no process finds a device", fix)
    try:
        text = host.run("dpkg-query", "--show", "--showformat=${Version}", "aws-neuronx-runtime-lib") or ""
    except ToolError:  # a system with rpm packages, or a container without this package
        text = ""
    have, runtime = _minor(driver), _minor(text)
    needed = PAIRS.get(runtime)
    if needed and have < needed:
        what = f"driver {driver} with runtime {text}, which came with driver {needed[0]}.{needed[1]}"
        why = "a runtime newer than its driver fails at the first call, or lacks features silently"
        return fault("driver", what, why, "upgrade aws-neuronx-dkms, or use the SDK of this driver")
    if not text:
        return passed("driver", f"driver {driver}")
    return passed("driver", f"driver {driver}, runtime {text}")


def _minor(version: str) -> tuple[int, int]:
    parts = version.split(".")[:2]
    if len(parts) > 1 and all(part.isdecimal() for part in parts):
        return int(parts[0]), int(parts[1])
    return 0, 0


def _efa(host: Host, machine: Machine) -> Finding:
    fix = "attach the instance's EFA interfaces, and install AWS's EFA driver; see docs/slurm_kubernetes.md"
    why = "collectives between machines fail, or fall back to TCP at a fraction of the speed"
    try:
        text = host.run("fi_info", "-p", "efa")
    except ToolError as error:  # fi_info ends with an error if it finds no device
        return fault("efa", str(error), why, fix)
    folder = host.at("/sys/class/infiniband")
    names: tuple[str, ...] = ()
    if text is not None:
        names = parse_fi_info(text)
    elif folder.is_dir():
        names = tuple(sorted(path.name for path in folder.iterdir()))
    if len(names) < machine.efa_devices:
        return fault("efa", f"{len(names)} of {machine.efa_devices} EFA devices: {listed(names) or 'none'}", why, fix)
    return passed("efa", f"{len(names)} EFA devices")
