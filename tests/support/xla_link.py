"""Whole commands on ranks that are processes with an XLA:CPU device each, and that need not import anything.

XLA:CPU joins no processes: torch-xla makes its client for CPUs without a store and without collectives, and of
`xla::cpu::CpuCollectives` what it is built with has `InProcessCollectives` alone. So the link between the devices of
several ranks is a fake: each collective is handed over to the host, where gloo carries it, and what follows is another
graph. All else is what a cluster has: processes with their devices and graphs, the store, the group of the hosts,
watchdogs, signals, checkpoints. As between devices, a collective whose other rank is gone, or late, does not end.

One rank has no link, and nothing of it is a fake.

Source: torch_xla 2.9, torch_xla/csrc/runtime/pjrt_registry.cpp, and the type names in _XLAC.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.common.process.placement import Placement
from tests.support.xla_processes import FAST, adopt

NEVER = timedelta(days=1)
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {"sum": lambda x: x.sum(dim=0), "max": lambda x: x.amax(dim=0)}
Groups = list[list[int]]


def link(report: Path | None = None) -> None:
    """Give this process a device, and join it to those that torchrun's variables tell of; before a command.

    Args:
        report: File for the counters of rank 0, as of its last boundary.
    """
    adopt({**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "XLA_FLAGS": FAST})
    place = Placement.read()
    if report is not None and place.rank == 0:
        os.environ["XLA_METRICS_FILE"] = str(report)
    if place.world == 1:
        return
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = place.world, place.rank
    carry(place)


def carry(place: Placement) -> None:
    """Hand the collectives of this process over to the hosts."""
    import torch_xla.core.xla_model as xm

    carrier: Any = _Carrier(place)
    xm.all_reduce, xm.all_gather = carrier.all_reduce, carrier.all_gather
    xm.reduce_scatter = carrier.reduce_scatter


def compiled(report: Path) -> int:
    """New graphs by the last boundary that torch-xla reported in a file, and no longer."""
    (written,) = report.parent.glob(f"{report.name}*")  # torch-xla adds a number where there are several ranks
    counts = re.findall(r"Counter: UncachedCompile\n  Value: (\d+)", written.read_text(encoding="utf-8"))
    written.unlink()
    return int(counts[-1])


class _Carrier:
    """Collectives of `torch_xla.core.xla_model` that nxtrain uses."""

    def __init__(self, place: Placement) -> None:
        self._place = place

    def all_reduce(self, op: str, inputs: Sequence[Tensor], *, scale: float, groups: Groups, pin_layout: bool) -> None:
        for x in inputs:
            x.copy_(self._reduced(op, x, scale, groups))

    def all_gather(self, x: Tensor, *, dim: int, groups: Groups, pin_layout: bool) -> Tensor:
        return torch.cat(self._brought(x, groups), dim).to(x.device)

    def reduce_scatter(
        self, op: str, x: Tensor, scale: float, dim: int, count: int, *, groups: Groups, pin_layout: bool
    ) -> Tensor:
        own = self._members(groups).index(self._place.rank)
        return self._reduced(op, x, scale, groups).chunk(count, dim)[own].contiguous()

    def _reduced(self, op: str, x: Tensor, scale: float, groups: Groups) -> Tensor:
        return (REDUCED[op](torch.stack(self._brought(x, groups))) * scale).to(x.device)

    def _brought(self, x: Tensor, groups: Groups) -> list[Tensor]:
        """Inputs of this rank's group; every rank of the world is at the same collective."""
        import torch_xla

        torch_xla.sync()
        own = x.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self._place.world)]
        try:
            dist.all_gather([_bytes(each) for each in found], _bytes(own), self._group)
        except RuntimeError:
            while True:
                time.sleep(1.0)
        return [found[rank] for rank in self._members(groups)]

    def _members(self, groups: Groups) -> list[int]:
        return next(group for group in groups if self._place.rank in group)

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=NEVER)
        return group


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
