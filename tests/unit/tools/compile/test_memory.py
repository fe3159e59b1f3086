"""As many compilers as the memory holds, of the machine or of the container, whichever has less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxtrain.tools.compile.memory import GIB, Memory, host_memory

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("size_gib", "num_compilers"),
    # What Linux shows of 32, 128 and 512 GiB and of 2 TiB, and a laptop.
    [(30.9, 1), (123.8, 2), (495.9, 8), (1996.6, 31), (8, 1)],
)
def test_one_compiler_per_64_gib(size_gib: float, num_compilers: int) -> None:
    assert Memory(int(size_gib * GIB), "this machine").num_compilers == num_compilers


def node(folder: Path, groups: str, **limits: str) -> Memory:
    """The memory by what a node shows below a folder."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups, encoding="ascii")
    for location, limit in limits.items():
        path = folder / "cgroups" / location.replace("__", "/").replace("_max", ".max").replace("_limit", ".limit")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n", encoding="ascii")
    return host_memory(folder / "proc", folder / "cgroups")


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    assert node(tmp_path, "0::/\n", memory_max="max") == Memory(TOTAL, "this machine")
    assert host_memory(tmp_path / "absent", tmp_path) == Memory(TOTAL, "this machine")


def test_a_limit_above_the_group_of_this_process_counts(tmp_path: Path) -> None:
    limits = {"a__b__memory_max": str(GIB), "a__memory_max": str(GIB // 2), "memory_max": "max"}
    assert node(tmp_path, "0::/a/b\n", **limits) == Memory(GIB // 2, "this container")


def test_a_container_of_cgroup_v1_finds_its_own_limit_at_the_root(tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n"
    assert node(tmp_path, groups, memory__memory_limit_in_bytes=str(GIB)).size_bytes == GIB


def test_no_limit_of_cgroup_v1_is_a_huge_number(tmp_path: Path) -> None:
    assert node(tmp_path, "4:memory:/\n", memory__memory_limit_in_bytes=str((1 << 63) - 4096)).size_bytes == TOTAL
