"""Resident memory of this process, as Linux counts pages.

The heap of `backends/cpu.py:keep_heap` has holes: blocks of other sizes were freed there and kept. The height of that
heap depends on addresses, and so on the machine. Tests that measure live bytes let glibc return freed pages first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def returns_pages() -> None:
    """Undo `backends/cpu.py:keep_heap`: large blocks are mappings of their own, and free pages go back."""
    mmap_max, trim_threshold, mmap_threshold = -4, -1, -3  # of malloc.h
    libc = ctypes.CDLL("libc.so.6")
    for option, value in ((mmap_max, 1 << 16), (trim_threshold, 1 << 17), (mmap_threshold, 1 << 17)):
        libc.mallopt(option, value)
    libc.malloc_trim(0)


def forget_peak() -> None:
    """Make the present size the peak so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def rise_bytes(act: Callable[[], object]) -> int:
    """Rise of resident memory above its present size while a function runs."""
    forget_peak()
    before = _resident_bytes("VmRSS")
    act()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].removesuffix("kB")) * 1024
