"""Processes with XLA:CPU devices, forked from one that has imported everything and made no device yet.

To import torch, torch-xla and the product takes five seconds of a core, a fork a few hundredths. torch-xla reads its
variables when a process makes its first device, so that each fork has its own devices, flags and pools.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.common.process.placement import Placement
from tests.support import processes
from tests.support.forked_python import play
from tests.support.processes import Started

FAST = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
"""Flags that compile in a seventh of the time: XLA's own passes run, LLVM's do not, fusions skip MLIR, and a graph is
one module of LLVM."""

OPTIMIZED = ""
"""The flags of a user: what XLA:CPU computes by default."""


def context() -> ForkServerContext:
    """Starts processes that have imported torch-xla; a process that asks for one has no forkserver of another kind."""
    return processes.context("tests.support.xla_preload")


def start(target: Callable[..., object], *args: Any, env: Mapping[str, str], log: Path) -> Started:
    """Call a function in a process of its own, which has these variables and no others."""
    return processes.start(context(), log, _adopted, dict(env), target, args)


def nxtrain(*argv: object, env: Mapping[str, str], log: Path) -> Started:
    """Start a command of nxtrain; each argument is written as on a shell's line."""
    return start(play, [sys.executable, "-m", "nxtrain", *map(str, argv)], dict(env), env=env, log=log)


def adopt(env: Mapping[str, str]) -> None:
    """Give this process the variables of another, with those that torch-xla adds when it is imported."""
    import torch_xla

    os.environ.clear()
    os.environ.update(env)
    torch_xla._setup_default_env()
    torch_xla._setup_xla_flags()


def _adopted(env: Mapping[str, str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    adopt(env)
    target(*args)


NEVER = timedelta(days=1)
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {"sum": lambda x: x.sum(dim=0), "max": lambda x: x.amax(dim=0)}
Groups = list[list[int]]


def link(report: Path | None = None) -> None:
    """Give this process a device, and join it to those that torchrun's variables tell of; before a command."""
    adopt({**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "XLA_FLAGS": FAST})
    placement = Placement.read()
    if report is not None and placement.rank == 0:
        os.environ["XLA_METRICS_FILE"] = str(report)
    if placement.world == 1:
        return
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = placement.world, placement.rank
    carry(placement)


def carry(placement: Placement) -> None:
    """Hand the collectives of this process over to the hosts."""
    import torch_xla.core.xla_model as xm

    carrier: Any = _Carrier(placement)
    xm.all_reduce, xm.all_gather = carrier.all_reduce, carrier.all_gather
    xm.reduce_scatter = carrier.reduce_scatter


def compiled(report: Path) -> int:
    """New graphs by the last boundary that torch-xla reported in a file, and no longer."""
    (written,) = report.parent.glob(f"{report.name}*")  # torch-xla adds a number where there are several ranks
    counts = re.findall(r"Counter: UncachedCompile\n  Value: (\d+)", written.read_text(encoding="utf-8"))
    written.unlink()
    return int(counts[-1])


class _Carrier:
    def __init__(self, placement: Placement) -> None:
        self._place = placement

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
        result = [torch.empty_like(own) for _ in range(self._place.world)]
        try:
            dist.all_gather([_bytes(item) for item in result], _bytes(own), self._group)
        except RuntimeError:
            while True:
                time.sleep(1.0)
        return [result[rank] for rank in self._members(groups)]

    def _members(self, groups: Groups) -> list[int]:
        return next(group for group in groups if self._place.rank in group)

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=NEVER)
        return group


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
