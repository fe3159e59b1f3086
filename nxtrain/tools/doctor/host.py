"""Checks of the host: instance type, limits, shared memory, disks, compile cache, clock and ports."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import Machine
from nxtrain.config.cache_dir import cache_folder
from nxtrain.config.operation_schema import CompileConfig
from nxtrain.tools.doctor.finding import Finding, Host, ToolError, fault, passed
from nxtrain.tools.doctor.outputs import ToolOutputError, parse_chronyc

GIB = 1 << 30

MIN_FILES = 8192  # open files that a rank may need: shards, sockets to all peers, logs
MIN_SHM_BYTES = GIB  # shared memory that ranks of a machine need; a container has 64 MiB unless it asks for more
MIN_FREE_BYTES = 5 * GIB  # free space on a disk that a run writes to, if nothing better is known
MIN_CACHE_BYTES = 10 * GIB  # free space for compiled graphs
MAX_OFFSET_S = 1.0  # largest clock offset with which logs of several machines can still be ordered
SET_SINCE = 1735689600.0  # 2025-01-01; a clock that shows an earlier time was never set


def check_instance(name: str, wanted: str, machine: Machine | None) -> Finding:
    """Check the machine's instance type against `cluster.instance` of the run.

    Args:
        name: Instance type that the machine reports; empty if unknown.
        wanted: Instance type of the configuration; empty if not set.
    """
    if wanted and name and wanted != name:
        why = "environment, graphs and degrees of the run are made for another machine"
        return fault("instance", f"{name}, but cluster.instance={wanted}", why, f"set cluster.instance={name}, or move")
    if machine is not None:
        name = machine.name
    return passed("instance", name or "no instance type that nxtrain knows")


def check_host(host: Host, machine: Machine | None) -> Iterator[Finding]:
    """Check resource limits, shared memory and clock of the host."""
    yield _limits(machine)
    yield _shared_memory(host)
    yield _clock(host)


def _limits(machine: Machine | None) -> Finding:
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = resource.RLIM_INFINITY
    if files != unlimited and files < MIN_FILES:
        why = "a rank opens a socket to each peer, and a file for each shard: Too many open files"
        return fault("limits", f"nofile={files}", why, f"ulimit -n {MIN_FILES}, or LimitNOFILE= in the unit of slurmd")
    if machine is not None and machine.efa_devices and locked != unlimited:
        fix = "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit of slurmd, or the capability IPC_LOCK of a pod"
        return fault("limits", f"memlock={locked}", "EFA pins its buffers, and cannot register memory", fix)
    shown = ["unlimited" if value == unlimited else str(value) for value in (files, locked)]
    return passed("limits", f"nofile={shown[0]}, memlock={shown[1]}")


def _shared_memory(host: Host) -> Finding:
    shm = host.at("/dev/shm")
    if not shm.is_dir():
        return fault("shm", "/dev/shm is absent", "ranks of a machine exchange data there", "mount a tmpfs there")
    size = shutil.disk_usage(shm).total
    if size < MIN_SHM_BYTES:
        what = f"/dev/shm has {size / GIB:.2f} GiB, less than {MIN_SHM_BYTES / GIB:.0f}"
        fix = "docker run --shm-size=8g; in a pod an emptyDir with medium: Memory at /dev/shm"
        return fault("shm", what, "collectives within the machine end with a bus error", fix)
    return passed("shm", f"{size / GIB:.1f} GiB")


def _clock(host: Host) -> Finding:
    shown, why = time.time(), "logs of several machines cannot be put in order, and requests to S3 are refused"
    fix = "start chronyd, with Amazon's time source 169.254.169.123"
    if shown < SET_SINCE:
        return fault("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(shown)), why, fix)
    try:
        text = host.run("chronyc", "-c", "tracking")
        if text is None:
            return passed("clock", "set; chronyc is not installed")
        offset = parse_chronyc(text)
    except (ToolError, ToolOutputError) as error:
        return fault("clock", str(error), why, fix)
    if offset is None:
        return fault("clock", "chronyd runs, and has no time source", why, fix)
    if offset > MAX_OFFSET_S:
        return fault("clock", f"{offset:.1f} s off", why, "chronyc makestep")
    return passed("clock", f"{offset:.6f} s off")


def check_disk(folder: Path, needed_bytes: int = MIN_FREE_BYTES) -> Finding:
    """Check that the disk of a run folder is writable and has enough space; the folder need not exist."""
    there = _existing(folder)
    free = shutil.disk_usage(there).free
    if not there.is_dir():
        fix = "delete or rename the file, or use another run.dir"
        return fault("disk", f"{there} is not a folder", "no checkpoint can be saved", fix)
    if not os.access(there, os.W_OK):
        return fault(
            "disk", f"{there} cannot be written", "no checkpoint can be saved", "check the rights and the mount"
        )
    if os.statvfs(there).f_blocks and free < needed_bytes:  # file systems of clusters may report no size
        what = f"{folder} has {free / GIB:.1f} GiB free of the {needed_bytes / GIB:.1f} GiB that are needed"
        return fault("disk", what, "checkpoints cannot be saved", "free space, or use another run.dir")
    return passed("disk", f"{folder} has {free / GIB:.1f} GiB free")


def check_cache(config: CompileConfig) -> Finding:
    """Check that the compile cache is on a local, writable disk with enough space."""
    try:
        folder = cache_folder(config)
    except ConfigError as error:
        problem = error.problems[0]
        why = "ranks that share a network file system lose and tear entries, and time out"
        return fault("cache", problem.reason, why, problem.hint or "use another compile.cache_dir")
    there = _existing(folder)
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        fix = "check its rights, or use another compile.cache_dir"
        return fault("cache", f"{there} cannot be written", "no graph can be compiled", fix)
    if free < MIN_CACHE_BYTES:
        fix = "nxtrain cache clean, or use another compile.cache_dir"
        return fault("cache", f"{folder} has {free / GIB:.1f} GiB free", "compiled graphs take several GiB", fix)
    return passed("cache", f"{folder} is on a local disk with {free / GIB:.1f} GiB free")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_port(host: Host, port: int, *, needs_all: bool) -> Finding:
    """Check that no program listens on the port of the rendezvous.

    Args:
        needs_all: A run is about to start, so a used port is a fault. Otherwise a running run may use the port.

    Source: https://docs.kernel.org/networking/proc_net_tcp.html: the local address is the second field, and the state
    of a listening socket, the fourth, is 0A.
    """
    text = "\n".join(host.read(f"/proc/net/{name}") for name in ("tcp", "tcp6"))
    listening = re.findall(r"^ *\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ", text, re.MULTILINE)
    used = port in {int(number, 16) for number in listening}
    if used and needs_all:
        why = "agents of the run cannot meet: Address already in use"
        fix = f"end the program that ss -ltnp 'sport = :{port}' shows, or use --first-node NAME:PORT"
        return fault("ports", f"a program listens on port {port}", why, fix)
    if used:
        return passed("ports", f"port {port} is in use")
    return passed("ports", f"port {port} is free")
