"""Processes with an XLA:CPU device each whose collectives are real, for whole commands of several ranks.

XLA:CPU joins no processes: torch-xla makes its CPU client without a store and without collectives, and what is built
into it has only those of one process (torch_xla 2.9, torch_xla/csrc/runtime/pjrt_registry.cpp; `InProcessCollectives`
alone implements `xla::cpu::CpuCollectives` there). So the link between the devices is a fake: each collective hands its
input to the host, where gloo carries it, and the rest of the graph is another one. All else is what runs on a cluster:
processes, their devices and graphs, the store, the group of the hosts, watchdogs, signals, checkpoints.

As between devices, a collective whose other rank is gone, or does not come, ends never.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401  # so that the processes need not import it
import torch_xla.runtime as xr
from torch import Tensor

from nxtrain.backends import xla
from nxtrain.backends.c10d import Placement

NEVER = timedelta(days=1)
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {"sum": lambda x: x.sum(dim=0), "max": lambda x: x.amax(dim=0)}


def link() -> None:
    """Give this process a device, and join it to the others that torchrun's variables tell of; before a command."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    place = Placement.read()
    if place.world == 1:
        return
    xr._WORLD_SIZE, xr._ORDINAL = place.world, place.rank
    carrier = _Carrier(place)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(xm, name, getattr(carrier, name))


class _Carrier:
    """The collectives of `torch_xla.core.xla_model` that nxtrain uses."""

    def __init__(self, place: Placement) -> None:
        self._place = place
        self._group: dist.ProcessGroup | None = None

    def all_reduce(
        self, op: str, inputs: Sequence[Tensor], scale: float, groups: list[list[int]], pin_layout: bool
    ) -> None:
        for x in inputs:
            x.copy_(self._reduced(op, x, scale, groups))

    def all_gather(self, x: Tensor, dim: int, groups: list[list[int]], pin_layout: bool) -> Tensor:
        return torch.cat(self._of_group(x, groups), dim).to(x.device)

    def reduce_scatter(
        self, op: str, x: Tensor, scale: float, dim: int, count: int, groups: list[list[int]], pin_layout: bool
    ) -> Tensor:
        own = self._members(groups).index(self._place.rank)
        return self._reduced(op, x, scale, groups).chunk(count, dim)[own].contiguous()

    def _reduced(self, op: str, x: Tensor, scale: float, groups: list[list[int]]) -> Tensor:
        whole = REDUCED[op](torch.stack(self._of_group(x, groups)))
        return (whole * scale if scale != 1.0 else whole).to(x.device)

    def _of_group(self, x: Tensor, groups: list[list[int]]) -> list[Tensor]:
        """What the ranks of this one's group bring; all ranks of the world are at the same collective."""
        torch_xla.sync()
        own = x.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self._place.world)]
        try:
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=NEVER)
            dist.all_gather([each.view(-1).view(torch.uint8) for each in found], own.view(-1).view(torch.uint8), self._group)
        except RuntimeError:
            while True:
                time.sleep(1.0)
        return [found[rank] for rank in self._members(groups)]

    def _members(self, groups: list[list[int]]) -> list[int]:
        return next(group for group in groups if self._place.rank in group)
