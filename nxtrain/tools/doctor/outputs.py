"""Parsers for the output of neuron-ls, nccom-test, nvidia-smi, fi_info, NCCL and chronyc.

Sources: tools/neuron-sys-tools/neuron-ls.rst and nccom-test.rst in https://github.com/aws-neuron/aws-neuron-sdk;
https://docs.nvidia.com/deploy/nvidia-smi; https://ofiwg.github.io/libfabric/main/man/fi_info.1.html;
https://chrony-project.org/doc/4.5/chronyc.html. neuron-top draws on a terminal only, so checks read the driver's
counters under /sys.
"""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass
from typing import Any


class ToolOutputError(ValueError):
    """Error for a tool's output that has an unknown form."""


@dataclass(frozen=True)
class Holder:
    """Process that holds accelerators open."""

    pid: int
    command: str  # command line, perhaps shortened
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Devices:
    """Accelerators of a machine, with the processes that hold them and their memory errors."""

    numbers: tuple[int, ...]
    holders: tuple[Holder, ...] = ()
    ecc: tuple[tuple[int, int], ...] = ()  # uncorrected errors by device, where counted


def parse_neuron_ls(text: str) -> Devices:
    """Parse `neuron-ls --json-output`: a list of devices, or an object with that list as its only list."""
    try:
        rows = json.loads(text)
        if isinstance(rows, dict):
            (rows,) = [value for value in rows.values() if isinstance(value, list)]
        held: dict[int, tuple[str, list[int]]] = {}
        for row in rows:
            for process in row.get("neuron_processes") or ():
                _, devices = held.setdefault(int(process["pid"]), (str(process.get("command", "")), []))
                devices.append(int(row["neuron_device"]))
        numbers = tuple(int(row["neuron_device"]) for row in rows)
    except (RecursionError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolOutputError(f"neuron-ls printed no list of devices: {error!r}") from error
    return Devices(numbers, _holders(held))


GPU_QUERY = "index,ecc.errors.uncorrected.volatile.total"
PROCESS_QUERY = "gpu_uuid,pid,process_name"
UUID_QUERY = "index,uuid"


def parse_nvidia_smi(gpus: str, uuids: str, processes: str) -> Devices:
    """Parse the CSV output of nvidia-smi for `GPU_QUERY`, `UUID_QUERY` and `PROCESS_QUERY`."""
    try:
        rows = [(int(index), errors) for index, errors in _lines(gpus)]
        index_of = {uuid: int(index) for index, uuid in _lines(uuids)}
        held: dict[int, tuple[str, list[int]]] = {}
        for uuid, pid, command in _lines(processes):
            _, devices = held.setdefault(int(pid), (command, []))
            devices.append(index_of[uuid])
        ecc = tuple((index, int(errors)) for index, errors in rows if errors.isdecimal())  # else [N/A]
    except (csv.Error, ValueError, KeyError) as error:
        raise ToolOutputError(f"nvidia-smi printed a table of an unknown form: {error!r}") from error
    return Devices(tuple(index for index, _ in rows), _holders(held), ecc)


def _holders(held: dict[int, tuple[str, list[int]]]) -> tuple[Holder, ...]:
    return tuple(Holder(pid, command, tuple(sorted(set(devices)))) for pid, (command, devices) in sorted(held.items()))


def _lines(text: str) -> list[list[str]]:
    lines = []
    for line in text.splitlines():  # one by one, since a stray quotation mark would hide the line after it
        for row in csv.reader([line], skipinitialspace=True, strict=True):
            if row:
                lines.append([field.strip() for field in row])
    return lines


def parse_fi_info(text: str) -> tuple[str, ...]:
    """Parse the names of EFA devices from `fi_info -p efa`, which lists each device once per endpoint type."""
    domains = re.findall(r"^[ \t]*domain:[ \t]*(\S+)", text, re.MULTILINE)
    return tuple(sorted({re.sub(r"-(rdm|dgrm)$", "", domain) for domain in domains}))


def parse_nccl_network(text: str) -> str:
    """Parse the network that NCCL uses from its log under `NCCL_DEBUG=INFO`; empty if no line names a network."""
    names = re.findall(r"NCCL INFO Using network (.+?)\s*$", text, re.MULTILINE)
    return names[-1] if names else ""


@dataclass(frozen=True)
class Bandwidth:
    """Time and bandwidth of a collective for one tensor size."""

    size_bytes: int  # bytes of the whole tensor
    time_s: float
    bus_bytes_s: float  # bandwidth of each rank's link, by the convention of nccl-tests


def parse_nccom_test(text: str) -> tuple[Bandwidth, ...]:
    """Parse the table of `nccom-test`, whose columns depend on its options; its bandwidths are in GiB/s."""
    rows: list[Bandwidth] = []
    columns: list[str] = []
    for line in text.splitlines():
        fields = line.split()
        if "busbw(GB/s)" in fields:
            columns = fields
        elif columns and len(fields) == len(columns) and fields[0].isdecimal():
            row = dict(zip(columns, fields, strict=True))
            time_column = "time(us)" if "time(us)" in row else "time:avg(us)"
            try:
                size, time = int(row["size(B)"]), float(row[time_column])
                bandwidth = float(row["busbw(GB/s)"])
            except (ValueError, KeyError) as error:
                raise ToolOutputError(f"nccom-test printed a table of an unknown form: {error!r}") from error
            if not (math.isfinite(time) and math.isfinite(bandwidth)):
                raise ToolOutputError(
                    f"nccom-test printed {time} us and {bandwidth} GB/s, which are not a finite measurement"
                )
            rows.append(Bandwidth(size, time / 1e6, bandwidth * 2**30))
    if not rows:
        raise ToolOutputError("nccom-test printed no table")
    return tuple(rows)


def parse_chronyc(text: str) -> float | None:
    """Parse the clock's offset in seconds from `chronyc -c tracking`; None if the clock has no time source."""
    fields: list[Any] = text.strip().split(",")
    try:
        offset, leap = abs(float(fields[4])), fields[13]
    except (IndexError, ValueError) as error:
        raise ToolOutputError("chronyc -c tracking printed a line of an unknown form") from error
    if not math.isfinite(offset):
        raise ToolOutputError(f"chronyc printed a clock offset of {offset}, which is not finite")
    if leap == "Not synchronised":
        return None
    return offset
