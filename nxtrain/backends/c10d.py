"""What backends on `torch.distributed` share: gloo on CPU, NCCL on CUDA, TorchNeuron's own on Trainium."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.backends.base import Backend, Collectives, Done, Op, Pending
from nxtrain.mesh import Axis, Mesh

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_FUNCTIONAL: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Placement:
    """What torchrun told this process about its place; a process started alone is rank 0 of 1."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @staticmethod
    def read() -> Placement:
        """Read torchrun's variables."""
        get = os.environ.get
        return Placement(
            rank=int(get("RANK", "0")),
            world=int(get("WORLD_SIZE", "1")),
            local_rank=int(get("LOCAL_RANK", "0")),
            local_world=int(get("LOCAL_WORLD_SIZE", "1")),
        )


@dataclass(frozen=True)
class _Async:
    work: dist.Work
    result: Tensor
    scale: float = 1.0

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result if self.scale == 1.0 else self.result.mul_(self.scale)


@dataclass(frozen=True)
class _Traced:
    """A collective in a graph of `torch.compile`, in the form that its compilers know."""

    out: Tensor
    into: Tensor | None = None
    scale: float = 1.0

    def wait(self) -> Tensor:
        out: Tensor = _FUNCTIONAL.wait_tensor(self.out)
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.into is None else self.into.copy_(out)


@dataclass(frozen=True)
class _AsyncBucket:
    flat: _Async
    shapes: list[torch.Size]

    def wait(self) -> list[Tensor]:
        parts = self.flat.wait().split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class C10dCollectives(Collectives):
    """Collectives of one rank of the default process group.

    A subgroup is made the first time an axis is used. All ranks reach that point in the same order, as they do every
    collective.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self._disordered: set[tuple[tuple[int, ...], ...]] = set()

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of this rank on an axis."""
        if axis.groups not in self._groups:
            if axis.size == self._world:
                group = dist.group.WORLD
            else:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in axis.groups])
            assert group is not None, axis
            self._groups[axis.groups] = group
            if any(list(ranks) != sorted(ranks) for ranks in axis.groups):
                self._disordered.add(axis.groups)
        return self._groups[axis.groups]

    def _ordered(self, axis: Axis) -> dist.ProcessGroup:
        """The group of an axis, which must count its ranks like the axis: it does so ascending, however it was made."""
        group = self.group(axis)
        assert axis.groups not in self._disordered, axis
        return group

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        if torch.compiler.is_compiling():
            return _Traced(_FUNCTIONAL.all_reduce(x, op, self.group(axis).group_name), into=x)
        return _Async(_started(dist.all_reduce(x, _REDUCE[op], self.group(axis), async_op=True)), x)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        group = self._ordered(axis)
        if torch.compiler.is_compiling():
            return _Traced(_FUNCTIONAL.all_gather_into_tensor(x, axis.size, group.group_name))
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
        return _Async(_started(dist.all_gather_into_tensor(out, x, group, async_op=True)), out)

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        group = self._ordered(axis)
        if torch.compiler.is_compiling():
            out = _FUNCTIONAL.reduce_scatter_tensor(x, "sum", axis.size, group.group_name)
            return _Traced(out, scale=scale)
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
        return _Async(_started(dist.reduce_scatter_tensor(out, x, group=group, async_op=True)), out, scale)

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        if axis.size == 1:
            return Done([tensor.to(dtype) for tensor in tensors])
        flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
        for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor)
        work = _started(dist.all_reduce(flat, group=self.group(axis), async_op=True))
        return _AsyncBucket(_Async(work, flat, scale), [tensor.shape for tensor in tensors])

    def device_mesh(self, device: str, mesh: Mesh) -> DeviceMesh:
        """The data parallel ranks as torch's own sharding takes them: (shard,) or (replica, shard)."""
        if mesh.replica.size == 1:
            return DeviceMesh.from_group(self.group(mesh.shard), device, mesh_dim_names=("shard",))
        (ranks,) = (group for group in mesh.dp.groups if mesh.rank in group)
        return DeviceMesh.from_group(
            [self.group(mesh.replica), self.group(mesh.shard)],
            device,
            torch.tensor(ranks).view(-1, mesh.shard.size),
            mesh_dim_names=("replica", "shard"),
        )

    def barrier(self) -> None:
        if self._world > 1:
            dist.barrier()


class C10dBackend(Backend):
    """A backend whose ranks are processes of `torch.distributed`."""

    collectives: C10dCollectives

    def _take_place(self) -> None:
        place = Placement.read()
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.collectives = C10dCollectives(self.world)

    def _join(self, process_group: str, hang_timeout_s: float, device_id: torch.device | None = None) -> None:
        if self.world > 1:
            timeout = timedelta(seconds=hang_timeout_s)
            dist.init_process_group(process_group, timeout=timeout, device_id=device_id)

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        return self.collectives.device_mesh(self.device.type, mesh)

    def close(self) -> None:
        super().close()
        if self.world > 1:
            dist.destroy_process_group()


class AcceleratorBackend(C10dBackend):
    """One with memory of its own, which computes while the host goes on."""

    def put(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        read = torch.stack([value.detach().to(self.device, torch.float32) for value in values.values()]).tolist()
        return dict(zip(values, read, strict=True))

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        return self.put(torch.tensor(values, dtype=torch.float32)).unbind()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work on every rank of the group"
    return work
