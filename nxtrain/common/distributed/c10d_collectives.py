"""Collectives over the process groups of `torch.distributed`, and a clock of the time that ranks wait in them."""

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
from nxtrain.common.distributed.failures import Peers, loss, translate_peer_errors
from nxtrain.common.mesh import Axis, Mesh, StateAxes
from nxtrain.common.process.greetings import suppress_gloo_messages
from nxtrain.common.text import listed


class WaitClock:
    """Context manager that adds up the seconds spent inside its contexts.

    Attributes:
        total_s: Seconds spent inside all contexts.
        note: Callback, with True as a context begins and with False as the context ends; None for no callback.
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

On devices with streams, the stream waits instead of the host, so that the clock stays at 0.
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
    """All other ranks of an axis as the peers of an error message. gloo does not report which rank was lost."""
    me = dist.get_rank()
    others = [rank for rank in axis.group_of(me) if rank != me]
    if len(others) == 1:
        return Peers(f"rank {others[0]}", others[0])
    return Peers(f"one of ranks {listed(others)} ({axis.name} of rank {me})")


@dataclass(frozen=True)
class _Traced:
    """A functional collective inside a graph of `torch.compile`, the only form that torch's compilers support."""

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
    """A pending point-to-point transfer, which keeps its tensors alive until it is complete."""

    works: Sequence[dist.Work]
    result: Result_co
    held: Tensor | None
    peer: Peers

    def wait(self) -> Result_co:
        with translate_peer_errors(self.peer), WAIT_CLOCK:
            for work in self.works:
                work.wait()
        return self.result


class C10dCollectives(Collectives):
    """Collectives of one rank over process groups of `torch.distributed`.

    The process group of an axis is created at the first use of the axis. Creation needs the same order on all ranks.
    Pipeline stages may use their axes in different orders, so `lay_out` creates the groups of a pipeline beforehand.

    Each pair of neighbouring pipeline stages has its own process group. In one group for all stages, NCCL would run all
    transfers of a rank in sequence on one stream. An early receive would then block a send to another rank, and could
    deadlock.

    Attributes:
        hang_timeout_s: Timeout of the process groups in seconds.
        limit: Text for the timeout in messages.
        options: Function that returns torch's options for the process group of an axis; None for torch's defaults.

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

    def rank_name(self, rank: int) -> str:
        """Name of a rank for messages."""
        return self._mesh.rank_name(rank) if self._mesh else f"rank {rank}"

    @property
    def _timeout(self) -> timedelta:
        # Without an explicit timeout, a later group would get torch's default, not the timeout of the first group.
        return timedelta(seconds=self.hang_timeout_s)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Process group of this rank on an axis; created at the first use."""
        if axis.groups not in self._groups:
            if axis.size == self._world:
                group = dist.group.WORLD
            else:
                ranks = [list(group) for group in axis.groups]
                options = self.options(axis)
                if options is not None:
                    options._timeout = self._timeout  # torch warns of another one
                with suppress_gloo_messages():
                    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=self._timeout, pg_options=options)
            assert group is not None, axis
            self._groups[axis.groups] = group
            if any(list(ranks) != sorted(ranks) for ranks in axis.groups):
                self._disordered.add(axis.groups)
        return self._groups[axis.groups]

    def _ordered(self, axis: Axis) -> dist.ProcessGroup:
        """Process group of an axis whose groups list their ranks ascending, since torch sorts the ranks of a group."""
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
        """Start an in-place all-reduce sum of a flat bucket over an axis."""
        work = _started(dist.all_reduce(flat, group=self.group(axis), async_op=True))
        return _Async(work, flat, axis, scale)

    def lay_out(self, mesh: Mesh) -> None:
        """Create the process groups of a mesh in one order on all ranks.

        Pipeline stages would otherwise create their groups in different orders. Groups that only compiled graphs use
        must also exist beforehand, since a compiled graph cannot create a group.
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
        """Create one process group for each pair of neighbouring pipeline stages."""
        size = mesh.pp_size
        links = set[tuple[int, int]]()
        for group in mesh.pp.groups:
            for i in range(size):
                links.add((min(group[i - 1], group[i]), max(group[i - 1], group[i])))
        for low, high in sorted(links):
            with suppress_gloo_messages():
                link = dist.new_group([low, high], timeout=self._timeout)
            if mesh.rank in (low, high):
                self._links[low, high] = link

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        rank, peer, group = self._reach(axis, to)
        with translate_peer_errors(peer):
            return _Transfer([_started(dist.isend(x, rank, group))], None, x, peer)

    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        rank, peer, group = self._reach(axis, source)
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        with translate_peer_errors(peer):
            return _Transfer([_started(dist.irecv(out, rank, group))], out, None, peer)

    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        rank, other, group = self._reach(axis, peer)
        out = torch.empty_like(x)
        # One batch: on NCCL both ends would otherwise wait to send before either receives.
        both = [dist.P2POp(dist.isend, x, rank, group), dist.P2POp(dist.irecv, out, rank, group)]
        with translate_peer_errors(other):
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
        with translate_peer_errors(peers):
            return _Transfer(dist.batch_isend_irecv(both), out, x, peers)

    def _reach(self, axis: Axis, position: int) -> tuple[int, Peers, dist.ProcessGroup]:
        """Global rank at a position of the axis, its `Peers` for messages, and the process group of both ranks."""
        me = dist.get_rank()
        peer = axis.group_of(me)[position]
        assert peer != me, (axis, position)
        group = self._links.get((min(me, peer), max(me, peer))) or self.group(axis)
        return peer, Peers(self.rank_name(peer), peer, self.limit), group

    def device_mesh(self, device: str, axes: StateAxes) -> DeviceMesh:
        """Device mesh of the ranks among which torch's own sharding splits parameters; see `RankGroup`."""
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
        """Drop all process groups, so that their threads end before the interpreter does."""
        self._links.clear()
        self._groups.clear()


def axes_of(mesh: Mesh) -> list[Axis]:
    """Axes of a mesh with a pipeline on which ranks communicate, in the same order on all ranks."""
    experts = [mesh.ep, mesh.experts.copies, mesh.experts.shard, mesh.experts.replica]
    stage = [mesh.tp, mesh.cp, mesh.dp, mesh.dp_cp, mesh.shard, mesh.replica, mesh.stage, *experts]
    return [axis for axis in (*stage, mesh.pp, mesh.batch, mesh.model, mesh.state, mesh.all) if axis.size > 1]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work on every rank of the group"
    return work
