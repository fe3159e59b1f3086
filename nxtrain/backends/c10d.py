"""Collectives over `torch.distributed`: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Collectives, Done, Op, Pending
from nxtrain.mesh import Axis

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Placement:
    """What torchrun told this process about its place; a process started alone is rank 0 of 1."""

    rank: int
    world: int
    local_rank: int

    @staticmethod
    def read() -> Placement:
        """Read torchrun's variables."""
        get = os.environ.get
        return Placement(int(get("RANK", "0")), int(get("WORLD_SIZE", "1")), int(get("LOCAL_RANK", "0")))


@dataclass(frozen=True)
class _Async:
    work: dist.Work
    result: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


class C10dCollectives(Collectives):
    """Collectives of one rank of the default process group.

    A subgroup is made the first time an axis is used. All ranks reach that point in the same order, as they do every
    collective.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of this rank on an axis."""
        if axis.groups not in self._groups:
            if axis.size == self._world:
                group = dist.group.WORLD
            else:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in axis.groups])
            assert group is not None, axis
            self._groups[axis.groups] = group
        return self._groups[axis.groups]

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending:
        if axis.size == 1:
            return Done(x)
        return _Async(_started(dist.all_reduce(x, _REDUCE[op], self.group(axis), async_op=True)), x)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending:
        if axis.size == 1:
            return Done(x)
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
        return _Async(_started(dist.all_gather_into_tensor(out, x, self.group(axis), async_op=True)), out)

    def start_reduce_scatter(self, x: Tensor, axis: Axis) -> Pending:
        if axis.size == 1:
            return Done(x)
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
        return _Async(_started(dist.reduce_scatter_tensor(out, x, group=self.group(axis), async_op=True)), out)

    def all_reduce_bucket(self, tensors: Sequence[Tensor], axis: Axis, scale: float = 1.0) -> None:
        if axis.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group(axis))
        flat.mul_(scale)
        reduced = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, reduced, strict=True):
            tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        if self._world > 1:
            dist.barrier()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work on every rank of the group"
    return work
