"""Number of compiler processes that fit into the memory of this machine or container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
PROC = Path("/proc")
PER_COMPILER_BYTES = 64 * GIB
"""Host memory in bytes that one compiler process may need.

Source: the default of `neuron_parallel_compile --num_parallel`: 8 on a trn1.32xlarge, 32 on a trn2.48xlarge.
"""

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Host memory that this process and its children may use, and its owner: the machine or a container."""

    size_bytes: int
    owner: str

    @property
    def num_compilers(self) -> int:
        """Number of compiler processes that fit into the memory, at least 1.

        The number is rounded to the nearest integer, since a machine reports slightly less memory than it has.
        """
        return max(1, int(self.size_bytes / PER_COMPILER_BYTES + 0.5))

    def __str__(self) -> str:
        return f"{self.owner} has {self.size_bytes / GIB:.0f} GiB, a compiler may need {PER_COMPILER_BYTES // GIB}"


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Memory:
    """Memory of this machine, or the limit of this container if that is smaller.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max; cgroup-v1/memory.html, limit_in_bytes.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min(_limits(proc / "self/cgroup", cgroups), default=total)
    if limit < total:
        return Memory(limit, "this container")
    return Memory(total, "this machine")


def _limits(groups: Path, root: Path) -> Iterator[int]:
    if not groups.exists():
        return
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = root, "memory.max"
        if controllers:
            base, name = root / "memory", "memory.limit_in_bytes"
        # A limit holds for all groups below its own. A container may not see its group under the host's path.
        group = Path(path.lstrip("/"))
        for folder in (base / group, *(base / parent for parent in group.parents)):
            try:
                text = (folder / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text.isdigit():
                yield int(text)
