"""Owners of locks and folders, and checks that their processes are alive.

Our own locks name their owner. The compiler's are empty files that a killed process leaves behind, and then every later
run waits for them without end ("Another process must be compiling MODULE_..."). Their owner is recognised by its
command line, where the compiler names the entry that it works on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nxtrain.config.cache_dir import host_name

PROC = Path("/proc")
GRACE_S = 300.0
"""Seconds since the last write to an entry for which a lock without an owner is believed: the compiler may be about to
start, or have ended just now."""
FOREIGN_S = 24 * 3600.0
"""Age in seconds up to which another machine's lock is believed: nobody can ask that machine."""

_TOKEN = re.compile(r"pid=(\d+) start=(\d+) boot=([\w-]*) host=(\S+)")
# Of /proc/PID/stat, counted behind the command's name: fields 4, ppid, and 22, starttime.
_PARENT_FIELD, _START_FIELD = 1, 19


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one of the same number.

    Args:
        pid: Its number.
        start: Clock ticks between boot and its start; 0 where the system does not tell.
        boot: The boot that it belongs to.
        host: Its machine, and there its namespace of process numbers.
    """

    pid: int
    start: int
    boot: str
    host: str

    def __str__(self) -> str:
        return f"pid={self.pid} start={self.start} boot={self.boot} host={self.host}"

    def is_alive(self) -> bool | None:
        """True if the process runs; None if it belongs to another machine or container."""
        if self.host != _host():
            return None
        return self.boot == _boot() and _start(self.pid) == self.start


def this_process() -> Owner:
    """Owner for the locks of this process."""
    return Owner(os.getpid(), _start(os.getpid()) or 0, _boot(), _host())


def read_owner(text: str) -> Owner | None:
    """The owner that a lock names, or the name of a folder; None if it names none."""
    match = _TOKEN.search(text)
    if match is None:
        return None
    return Owner(int(match[1]), int(match[2]), match[3], match[4])


def lock_is_live(lock: Path, folder: Path, *, grace_s: float = GRACE_S) -> bool:
    """True if a process works under a lock.

    Args:
        lock: The file.
        folder: What it locks; its name is on the compiler's command line.
        grace_s: Seconds since the last write to the folder for which a lock without an owner is believed.
    """
    try:
        text, written_s = lock.read_text(encoding="utf-8", errors="replace"), lock.stat().st_mtime
        owner = read_owner(text)
        if owner is not None:
            return is_live(owner, time.time() - written_s)
        if written_s < _booted_s():
            return False
        written_s = max([written_s, *(path.stat().st_mtime for path in folder.iterdir())])
    except FileNotFoundError:
        return True  # whoever took a file away just now was at work
    return time.time() - written_s < grace_s or next(naming(folder.name), None) is not None


def is_live(owner: Owner, age_s: float) -> bool:
    """True if an owner counts as live; an owner on another machine does until its lock is `FOREIGN_S` old."""
    alive = owner.is_alive()
    if alive is None:
        return age_s < FOREIGN_S
    return alive


def naming(entry: str) -> Iterator[int]:
    """Running processes, except this one, whose command line names an entry, as its compiler's does."""
    name = entry.encode()
    for process in PROC.glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and name in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:  # it has ended, or is another user's
            continue


def descends(pid: int, ancestor: int) -> bool:
    """True if a process is another one or descends from it through processes that still run."""
    while pid > 1 and pid != ancestor:
        try:
            pid = int(_fields(pid)[_PARENT_FIELD])
        except OSError:
            return False
    return pid == ancestor


def _start(pid: int) -> int | None:
    """Clock ticks between boot and the start of a process; None if there is none of that number."""
    if not PROC.exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    try:
        fields = _fields(pid)
    except OSError:
        return None
    if fields[0] in "ZX":  # a zombie holds nothing
        return None
    return int(fields[_START_FIELD])


def _fields(pid: int) -> list[str]:
    # The command's name stands in brackets and may itself hold blanks and brackets.
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _host() -> str:
    # Containers of one machine may share its name, but not its processes.
    namespace = PROC / "self/ns/pid"
    if namespace.is_symlink():
        return f"{host_name()}:{namespace.readlink()}"
    return host_name()


def _boot() -> str:
    path = PROC / "sys/kernel/random/boot_id"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _booted_s() -> float:
    """Boot time of this machine in seconds since the epoch; 0 if unknown."""
    try:
        lines = (PROC / "stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)
