"""Resident memory of this process, as Linux counts pages.

The heap of `backends/cpu.py:keep_heap` has holes: blocks of other sizes were freed there and kept. The height of that
heap depends on addresses, and so on the machine. Tests that measure live bytes let glibc return freed pages first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.config.check import Resolved
from nxtrain.plan.job import Job
from nxtrain.plan.memory import Bytes, stage_bytes
from nxtrain.tools.trace.fake_rank import Traced

TOLERANCE = 0.1
"""Largest share by which a predicted total may differ from the measured one."""

QUANTIZED = 1e-3
"""The same of frozen parameters in NF4, of which a plan counts groups of scales that may not be full."""

Formula = Callable[[Job, int], Bytes]


@dataclass(frozen=True)
class Measured:
    """A training step of real ranks, whose tensors were counted."""

    name: str
    resolved: Resolved
    ranks: tuple[Traced, ...]

    def errors(self, formula: Formula = stage_bytes) -> list[str]:
        """Differences of a formula: of state by a byte, of a total beyond the tolerance."""
        job = job_of(self.resolved)
        return [error for stage, rank in enumerate(self.ranks) for error in _errors(formula(job, stage), stage, rank)]


def job_of(resolved: Resolved) -> Job:
    """A run as a plan sees it."""
    return Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)


def _errors(predicted: Bytes, stage: int, rank: Traced) -> list[str]:
    bounds = {"params": 0.0, "frozen": QUANTIZED, "optimizer": 0.0, "total": TOLERANCE}
    pairs = {kind: (getattr(predicted, kind), getattr(rank, kind)) for kind in bounds}
    return [
        f"stage {stage}, {kind}: {ours:,} predicted, {theirs:,} measured"
        for kind, (ours, theirs) in pairs.items()
        if ours != pytest.approx(theirs, rel=bounds[kind], abs=0)
    ]


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
