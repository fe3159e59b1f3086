"""Collectives over the process groups of `torch.distributed`, and a clock of the waits in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nxtrain.common.distributed.collectives import Collectives, Done, Op, Pending, PendingParts, Result_co, RowCounts
from nxtrain.common.distributed.failures import Peers, blaming, loss
from nxtrain.common.mesh import Axis, Mesh, StateAxes
from nxtrain.common.process.greetings import without_greetings
from nxtrain.common.text import listed


class WaitClock:
    """Clock of the time spent within its context.

    Attributes:
        note: Called with True as a wait begins, and with False as the wait ends; None: no callback.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.note: Callable[[bool], None] | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        if self.note is not None:
            self.note(True)
        self._since = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.total_s += time.perf_counter() - self._since
        if self.note is not None:
            self.note(False)


WAIT_CLOCK = WaitClock()
"""Clock of the time that the host waits in collectives of `torch.distributed`.

On devices with streams, the streams wait, and the host spends no time.
"""


_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_FUNCTIONAL: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class _Async:
    work: dist.Work
    result: Tensor
    axis: Axis
    scale: float = 1.0

    def wait(self) -> Tensor:
        try:
            with WAIT_CLOCK:
                self.work.wait()
        except RuntimeError as error:
            lost = loss(error, _others(self.axis))
            if lost is None:
                raise
            raise lost from error
        return self.result if self.scale == 1.0 else self.result.mul_(self.scale)


def _others(axis: Axis) -> Peers:
    """Make the peers of an axis, which are all other ranks: gloo does not report the lost rank."""
    me = dist.get_rank()
    others = [rank for rank in axis.group_of(me) if rank != me]
    if len(others) == 1:
        return Peers(f"rank {others[0]}", others[0])
    return Peers(f"one of ranks {listed(others)} ({axis.name} of rank {me})")


@dataclass(frozen=True)
class _Traced:
    """A functional collective in a graph of `torch.compile`, the form that its compilers support."""

    out: Tensor
    into: Tensor | None = None
    scale: float = 1.0

    def wait(self) -> Tensor:
        out: Tensor = _FUNCTIONAL.wait_tensor(self.out)
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.into is None else self.into.copy_(out)


@dataclass(frozen=True)
class _Transfer(Generic[Result_co]):
    """A transfer between two ranks, which keeps its tensors alive."""

    works: Sequence[dist.Work]
    result: Result_co
    held: Tensor | None
    peer: Peers

    def wait(self) -> Result_co:
        with blaming(self.peer), WAIT_CLOCK:
            for work in self.works:
                work.wait()
        return self.result


class C10dCollectives(Collectives):
    """Collectives of one rank of the default process group.

    A subgroup is made at the first use of an axis. All ranks reach this point in the same order, as they reach every
    collective. Pipeline stages may differ in this order, so `lay_out` makes the subgroups of a pipeline beforehand.

    Transfers between neighbours of the pipeline have a group for each pair. In the axis's group, NCCL would run all of
    a rank's transfers in sequence on one stream. A receive that was started early would block a send to another rank,
    and could deadlock.

    Attributes:
        hang_timeout_s: Seconds that the process groups wait for a rank.
        limit: The same limit as a text for messages.
        options: Options of torch's for a new process group of an axis; None: its defaults.

    Source: torch 2.9, `ProcessGroupNCCL::pointToPoint` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
    """

    def __init__(self, world: int) -> None:
        self.hang_timeout_s, self.limit = 1800.0, Peers.limit
        self.options: Callable[[Axis], Any] = lambda axis: None
        self._world = world
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self._disordered: set[tuple[tuple[int, ...], ...]] = set()
        self._mesh: Mesh | None = None

    def words(self, rank: int) -> str:
        """Name of a rank in messages."""
        return self._mesh.words(rank) if self._mesh else f"rank {rank}"

    @property
    def _timeout(self) -> timedelta:
        # A later group would get torch's default limit, not the limit of the first group.
        return timedelta(seconds=self.hang_timeout_s)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Process group of this rank on an axis."""
        if axis.groups not in self._groups:
            if axis.size == self._world:
                group = dist.group.WORLD
            else:
                ranks = [list(group) for group in axis.groups]
                options = self.options(axis)
                if options is not None:
                    options._timeout = self._timeout  # torch warns of another one
                with without_greetings():
                    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=self._timeout, pg_options=options)
            assert group is not None, axis
            self._groups[axis.groups] = group
            if any(list(ranks) != sorted(ranks) for ranks in axis.groups):
                self._disordered.add(axis.groups)
        return self._groups[axis.groups]

    def _ordered(self, axis: Axis) -> dist.ProcessGroup:
        """Process group of an axis whose ranks must be ascending, since torch sorts the ranks of any group."""
        group = self.group(axis)
        assert axis.groups not in self._disordered, axis
        return group

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        if torch.compiler.is_compiling():
            return _Traced(_FUNCTIONAL.all_reduce(x, op, self.group(axis).group_name), into=x)
        return _Async(_started(dist.all_reduce(x, _REDUCE[op], self.group(axis), async_op=True)), x, axis)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        group = self._ordered(axis)
        if torch.compiler.is_compiling():
            return _Traced(_FUNCTIONAL.all_gather_into_tensor(x, axis.size, group.group_name))
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
        return _Async(_started(dist.all_gather_into_tensor(out, x, group, async_op=True)), out, axis)

    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        group = self._ordered(axis)
        if rows is None and torch.compiler.is_compiling():
            sizes = [x.shape[0] // axis.size] * axis.size
            return _Traced(_FUNCTIONAL.all_to_all_single(x, sizes, sizes, group.group_name))
        if rows is None:
            out = torch.empty_like(x)
            return _Async(_started(dist.all_to_all_single(out, x, group=group, async_op=True)), out, axis)
        out = x.new_empty(sum(rows.received), *x.shape[1:])
        received, sent = list(rows.received), list(rows.sent)
        return _Async(_started(dist.all_to_all_single(out, x, received, sent, group, async_op=True)), out, axis)

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        if axis.size == 1:
            return Done(x)
        group = self._ordered(axis)
        if torch.compiler.is_compiling():
            out = _FUNCTIONAL.reduce_scatter_tensor(x, "sum", axis.size, group.group_name)
            return _Traced(out, scale=scale)
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
        return _Async(_started(dist.reduce_scatter_tensor(out, x, group=group, async_op=True)), out, axis, scale)

    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        if axis.size == 1:
            return Done([tensor.to(dtype) for tensor in tensors])
        sizes = [tensor.numel() for tensor in tensors]
        flat = tensors[0].new_empty(sum(sizes), dtype=dtype)
        for part, tensor in zip(flat.split(sizes), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor)
        return PendingParts(self._start_sum(flat, axis, scale), [tensor.shape for tensor in tensors])

    def _start_sum(self, flat: Tensor, axis: Axis, scale: float) -> Pending[Tensor]:
        """Start the sum of a bucket over an axis, in place."""
        work = _started(dist.all_reduce(flat, group=self.group(axis), async_op=True))
        return _Async(work, flat, axis, scale)

    def lay_out(self, mesh: Mesh) -> None:
        """Make all groups that ranks of different pipeline stages would otherwise make in different orders.

        Some groups may be used in compiled graphs alone, which cannot make one.
        """
        self._mesh = mesh
        for axis in (mesh.cp, mesh.tp, mesh.dense.shard, mesh.ep, mesh.dp_cp, mesh.stage):
            if axis.size > 1:
                self.group(axis)
        if mesh.pp_size == 1:
            return
        for axis in axes_of(mesh):
            self.group(axis)
        self._link(mesh)

    def _link(self, mesh: Mesh) -> None:
        """Make a group for each pair of neighbours in the pipeline."""
        size = mesh.pp_size
        links = set[tuple[int, int]]()
        for group in mesh.pp.groups:
            for i in range(size):
                links.add((min(group[i - 1], group[i]), max(group[i - 1], group[i])))
        for low, high in sorted(links):
            with without_greetings():
                link = dist.new_group([low, high], timeout=self._timeout)
            if mesh.rank in (low, high):
                self._links[low, high] = link

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        rank, peer, group = self._reach(axis, to)
        with blaming(peer):
            return _Transfer([_started(dist.isend(x, rank, group))], None, x, peer)

    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        rank, peer, group = self._reach(axis, source)
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        with blaming(peer):
            return _Transfer([_started(dist.irecv(out, rank, group))], out, None, peer)

    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        rank, other, group = self._reach(axis, peer)
        out = torch.empty_like(x)
        # One batch: on NCCL both ends would otherwise wait to send before either receives.
        both = [dist.P2POp(dist.isend, x, rank, group), dist.P2POp(dist.irecv, out, rank, group)]
        with blaming(other):
            works = dist.batch_isend_irecv(both)
        return _Transfer(works, out, x, other).wait()

    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        if hops % axis.size == 0:
            return Done(x)
        group, ranks = self.group(axis), axis.group_of(dist.get_rank())
        out = torch.empty_like(x)
        after, before = ranks[(axis.rank + hops) % axis.size], ranks[(axis.rank - hops) % axis.size]
        # One batch: on NCCL every rank would otherwise wait to send before any receives.
        both = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, out, before, group)]
        peers = _others(axis)
        with blaming(peers):
            return _Transfer(dist.batch_isend_irecv(both), out, x, peers)

    def _reach(self, axis: Axis, position: int) -> tuple[int, Peers, dist.ProcessGroup]:
        """Global rank at a position of the axis, the peer for messages, and the process group between both ranks."""
        me = dist.get_rank()
        peer = axis.group_of(me)[position]
        assert peer != me, (axis, position)
        group = self._links.get((min(me, peer), max(me, peer))) or self.group(axis)
        return peer, Peers(self.words(peer), peer, self.limit), group

    def device_mesh(self, device: str, axes: StateAxes) -> DeviceMesh:
        """Device mesh of the ranks that hold the same parameters, for torch's own sharding; see `RankGroup`."""
        if axes.replica.size == 1:
            return DeviceMesh.from_group(self.group(axes.shard), device, mesh_dim_names=("shard",))
        return DeviceMesh.from_group(
            [self.group(axes.replica), self.group(axes.shard)],
            device,
            torch.tensor(axes.copies.group_of(dist.get_rank())).view(-1, axes.shard.size),
            mesh_dim_names=("replica", "shard"),
        )

    def barrier(self) -> None:
        if self._world > 1:
            with WAIT_CLOCK:
                dist.barrier()

    def forget(self) -> None:
        """Drop all groups, so that they end with the process group, and their threads before the interpreter."""
        self._links.clear()
        self._groups.clear()


def axes_of(mesh: Mesh) -> list[Axis]:
    """Axes of a pipeline on which ranks communicate, in one order on all ranks."""
    experts = [mesh.ep, mesh.experts.copies, mesh.experts.shard, mesh.experts.replica]
    stage = [mesh.tp, mesh.cp, mesh.dp, mesh.dp_cp, mesh.shard, mesh.replica, mesh.stage, *experts]
    return [axis for axis in (*stage, mesh.pp, mesh.batch, mesh.model, mesh.state, mesh.all) if axis.size > 1]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work on every rank of the group"
    return work
