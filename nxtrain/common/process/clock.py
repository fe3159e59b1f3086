"""Moments that changes of the wall clock do not move: uptime of a machine, with the identity of its boot."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux; counts in sleep too, the same for all processes


@dataclass(frozen=True)
class Instant:
    """A moment on some machine, which later moments can be compared with.

    Args:
        boot: Identity of the machine's boot; empty if the machine has none.
        up: Seconds that never run backwards, since the boot or, without an identity, since any time.
        wall: Seconds since 1970 by the wall clock, which may jump.
    """

    boot: str
    up: float
    wall: float

    def since(self, earlier: Instant) -> float:
        """Seconds since an earlier moment, perhaps of another process or machine; never below 0."""
        if self.boot and self.boot == earlier.boot:
            return max(0.0, self.up - earlier.up)
        return max(0.0, self.wall - earlier.wall)


def now() -> Instant:
    """Return the present moment."""
    return Instant(_boot(), time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK), time.time())


def process_began() -> Instant:
    """Return the moment at which this process was started, before any import; now, if the system has no record.

    Source: proc(5), field 22 of /proc/PID/stat: clock ticks since the boot.
    """
    present = now()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return present
    return Instant(present.boot, up, present.wall - (present.up - up)) if 0 < up <= present.up else present


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
