"""Points in time that are comparable across processes of a machine and immune to changes of the wall clock."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux; counts in sleep too, the same for all processes


@dataclass(frozen=True)
class Instant:
    """A point in time on some machine, comparable with later ones.

    Args:
        boot: Boot id of the machine; empty if the system has none.
        up: Monotonic seconds since the boot. Without a boot id, the zero point is arbitrary.
        wall: Wall clock seconds since 1970; the wall clock may jump.
    """

    boot: str
    up: float
    wall: float

    def since(self, earlier: Instant) -> float:
        """Seconds since an earlier instant, perhaps of another process or machine; never negative."""
        if self.boot and self.boot == earlier.boot:
            return max(0.0, self.up - earlier.up)
        return max(0.0, self.wall - earlier.wall)


def now() -> Instant:
    """Return the current instant."""
    return Instant(_boot_id(), time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK), time.time())


def process_began() -> Instant:
    """Return the instant at which this process was started, before any import; the current instant if unknown.

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
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
