"""Collectives between processes of one CPU host through shared memory; gloo connects different hosts.

gloo passes each message through a socket and three threads. `exchange.cpp` passes bytes through memory that both
processes map, so a small collective costs a few context switches. The memory is anonymous (`memfd_create`), and is
freed when its processes end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import select
import time
from collections.abc import Sequence
from ctypes import c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.common.distributed.c10d_collectives import WAIT_CLOCK, C10dCollectives, axes_of
from nxtrain.common.distributed.collectives import Op, Pending, Result_co, RowCounts
from nxtrain.common.distributed.failures import Peers, lost_peer, peer_timeout
from nxtrain.common.mesh import Axis, Mesh

Result = TypeVar("Result")

MOST_RANKS = 64
"""Most ranks of a host that share memory; the links between all pairs of ranks take address space."""

SLICE_S = 0.1
"""Interval, in seconds, at which a waiting rank checks that its peer process is alive."""

GATHER, SCATTER, SUM, MAX, SEND, RECEIVE = range(6)
"""Operation codes of `exchange.cpp`."""

REDUCED = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3, torch.int64: 4, torch.int32: 5}
"""Type codes of the types that `exchange.cpp` reduces; code 0 means raw bytes."""

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "nx_box_bytes": (c_long, (c_int,)),
    "nx_lanes": (c_int, ()),
    "nx_open_exchange": (c_void_p, (c_void_p, c_int, c_int, c_long)),
    "nx_close_exchange": (None, (c_void_p,)),
    "nx_has_left": (c_int, (c_void_p, c_int)),
    "nx_open_lane": (c_void_p, (c_void_p, c_int, c_void_p, c_int, c_int)),
    "nx_open_link": (c_void_p, (c_void_p, c_int)),
    "nx_start": (c_void_p, (c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p, c_long, c_double)),
    "nx_wait": (c_int, (c_void_p, c_void_p, c_long)),
    "nx_missing": (c_int, (c_void_p, c_void_p, c_void_p)),
}


@dataclass(frozen=True)
class Box:
    """Address of the shared memory of one rank, for the other processes of the host.

    Args:
        host: Hash of boot, PID namespace and user, which processes must share to map each other's memory.
        process: Process id of the rank.
        file: File descriptor of the memory in the rank's process; -1 if the rank cannot share memory.
    """

    host: int
    process: int
    file: int


class Exchange:
    """Shared memory of the ranks of one host, with the operations of `exchange.cpp` on it.

    Args:
        library: Library that `build.load()` returns.
        rank: Rank of this process.
        world: Number of ranks on all hosts.
    """

    def __init__(self, library: ctypes.CDLL, rank: int, world: int) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library, self._rank = library, rank
        self._bytes = library.nx_box_bytes(min(world, MOST_RANKS))
        self._file = os.memfd_create("nxtrain")
        os.ftruncate(self._file, self._bytes)
        self._handle: Any = None
        self._hosts: list[int] = []
        self._ranks: list[int] = []
        self._processes: dict[int, int] = {}
        self._lanes: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._links: dict[int, Any] = {}
        self._held: dict[Any, tuple[Tensor | None, Tensor | None]] = {}

    @property
    def box(self) -> Box:
        """Address of this rank's shared memory."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").stat().st_ino  # PID namespace
        digest = hashlib.sha256(f"{boot} {space} {os.getuid()}".encode()).digest()
        return Box(int.from_bytes(digest[:7], "big"), os.getpid(), self._file)

    def map(self, boxes: Sequence[Box]) -> None:
        """Map the shared memory of all ranks of this host.

        Args:
            boxes: Memory addresses of all ranks of the world.

        Raises:
            OSError: The host has too many ranks, or the memory of a rank cannot be mapped.
        """
        self._hosts = [box.host for box in boxes]
        self._ranks = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self._rank]]
        if len(self._ranks) > MOST_RANKS:
            raise OSError(f"{len(self._ranks)} ranks on this host; shared memory supports at most {MOST_RANKS}")
        files: list[int] = []
        try:
            for rank in self._ranks:
                files.append(os.open(f"/proc/{boxes[rank].process}/fd/{boxes[rank].file}", os.O_RDWR))
                self._processes[rank] = os.pidfd_open(boxes[rank].process)
            position, number = self._ranks.index(self._rank), len(files)
            self._handle = self._library.nx_open_exchange((c_int * number)(*files), number, position, self._bytes)
            if not self._handle:
                raise OSError("mmap of the shared memory of another rank failed")
        finally:
            for file in files:
                os.close(file)

    def lane(self, axis: Axis) -> Any:
        """Return the shared memory channel of this rank's process group on a mesh axis.

        All ranks must call this for the axes in the same order.

        Returns:
            Channel in `exchange.cpp`; None if a group of the axis spans several hosts.
        """
        if axis.groups not in self._lanes:
            self._lanes[axis.groups] = self._open_lane(axis)
        return self._lanes[axis.groups]

    def _open_lane(self, axis: Axis) -> Any:
        index = sum(lane is not None for lane in self._lanes.values())
        for group in axis.groups:
            hosts = {self._hosts[rank] for rank in group}
            if len(hosts) > 1:
                return None
        if index == self._library.nx_lanes():
            return None
        group = axis.group_of(self._rank)
        members = (c_int * len(group))(*map(self._ranks.index, group))
        return self._library.nx_open_lane(self._handle, index, members, len(group), group.index(self._rank))

    def link(self, peer: int) -> Any:
        """Return the shared memory channel for transfers with another rank; None if that rank is on another host."""
        if peer not in self._ranks:
            return None
        if peer not in self._links:
            self._links[peer] = self._library.nx_open_link(self._handle, self._ranks.index(peer))
        return self._links[peer]

    def start(self, lane: Any, kind: int, x: Tensor | None, out: Tensor | None, dtype: int, scale: float) -> Any:
        """Start a collective or transfer in shared memory, and keep its tensors alive until it completes."""
        counted = out if kind in (SCATTER, RECEIVE) else x
        assert counted is not None and counted.is_contiguous()
        count = counted.numel() if dtype else counted.nbytes
        x_at, out_at = (tensor if tensor is None else tensor.data_ptr() for tensor in (x, out))
        operation = self._library.nx_start(self._handle, lane, kind, dtype, x_at, out_at, count, scale)
        self._held[operation] = x, out
        return operation

    def wait(self, lane: Any, operation: Any, limit_s: float) -> tuple[int, bool] | None:
        """Wait until a collective or transfer in shared memory completes.

        Returns:
            None when the operation is complete. Otherwise the missing rank, and True if its process has ended.
        """
        until, has_ended = time.monotonic() + limit_s, False
        while not self._library.nx_wait(self._handle, operation, int(SLICE_S * 1e6)):
            position = self._library.nx_missing(self._handle, lane, operation)
            if position < 0:
                continue
            # The last chunk of a rank that has ended may have arrived since: the next wait finds it.
            if has_ended or time.monotonic() > until:
                return self._ranks[position], has_ended
            looking = select.poll()  # not `select`, which takes no file descriptor above 1023
            looking.register(self._processes[self._ranks[position]], select.POLLIN)
            has_ended = bool(looking.poll(0) or self._library.nx_has_left(self._handle, position))
        del self._held[operation]
        return None

    def close(self) -> None:
        """Leave the exchange, and free its shared memory."""
        if self._handle:
            self._library.nx_close_exchange(self._handle)
            self._handle = None
        for file in (self._file, *self._processes.values()):
            os.close(file)
        self._processes.clear()


@dataclass(frozen=True)
class _Shared(Generic[Result_co]):
    """Pending collective or transfer in shared memory."""

    owner: SharedMemoryCollectives
    lane: Any
    operation: Any
    result: Result_co

    def wait(self) -> Result_co:
        self.owner.finish(self.lane, self.operation)
        return self.result


@dataclass(frozen=True)
class _Several(Generic[Result_co]):
    """Several pending transfers in shared memory with one result, such as an all-to-all."""

    parts: Sequence[Pending[Any]]
    result: Result_co

    def wait(self) -> Result_co:
        for part in self.parts:
            part.wait()
        return self.result


class SharedMemoryCollectives(C10dCollectives):
    """Collectives through shared memory for groups within one host, and through gloo for other groups.

    Sums are added in rank order, in float32 for bfloat16, and are bitwise equal on all ranks.
    """

    _exchange: Exchange | None = None

    def share(self, library: ctypes.CDLL | None, reason: str = "") -> str:
        """Open shared memory between the ranks of this host; all ranks call this once the process group exists.

        Args:
            library: Library that `build.load()` returns; None to use gloo.
            reason: Reason why `library` is None.

        Returns:
            Reason why all ranks use gloo; empty if shared memory is in use.
        """
        self.unshare()
        exchange, box = None, Box(0, 0, -1)
        try:
            if library:
                exchange = Exchange(library, dist.get_rank(), self._world)
                box = exchange.box
        except (OSError, AttributeError) as error:  # AttributeError: a kernel or a Python without memfd
            reason = f"this machine cannot create shared memory: {error}"
        rows = torch.empty(self._world, 3, dtype=torch.int64)
        dist.all_gather_into_tensor(rows, torch.tensor([[box.host, box.process, box.file]]))
        boxes = [Box(*row) for row in rows.tolist()]
        try:
            if exchange and all(box.file >= 0 for box in boxes):
                exchange.map(boxes)
        except (OSError, AttributeError) as error:
            reason = f"the shared memory of another rank cannot be mapped: {error}"
        lacking = torch.tensor(float(exchange is None or bool(reason)))
        dist.all_reduce(lacking)
        if lacking:
            if exchange:
                exchange.close()
            return reason or "another rank cannot share memory"
        self._exchange = exchange
        return ""

    def unshare(self) -> None:
        """Close the shared memory; later collectives use gloo."""
        if self._exchange:
            self._exchange.close()
        self._exchange = None

    def _lane(self, axis: Axis, dtype: torch.dtype | None = None) -> Any:
        """Return the shared memory channel for a collective on a mesh axis; None if gloo runs the collective."""
        if self._exchange is None or torch.compiler.is_compiling() or (dtype and dtype not in REDUCED):
            return None
        self.group(axis)  # a block that is compiled later cannot make the group
        return self._exchange.lane(axis)

    def _start(
        self, lane: Any, kind: int, x: Tensor | None, out: Tensor | None, result: Result, scale: float = 1.0
    ) -> Pending[Result]:
        assert self._exchange is not None
        dtype = 0 if kind in (GATHER, SEND, RECEIVE) or x is None else REDUCED[x.dtype]
        return _Shared(self, lane, self._exchange.start(lane, kind, x, out, dtype, scale), result)

    def finish(self, lane: Any, operation: Any) -> None:
        """Wait until a collective or transfer in shared memory completes.

        Raises:
            LostPeerError: The process of a peer rank has ended.
            HangError: A peer rank did not take part within the time limit.
        """
        assert self._exchange is not None
        with WAIT_CLOCK:
            missing = self._exchange.wait(lane, operation, self.hang_timeout_s)
        if missing:
            rank, has_ended = missing
            peer = Peers(self.rank_name(rank), rank, self.limit)
            if has_ended:
                raise lost_peer(peer, "its process has ended, or it has left the run")
            raise peer_timeout(peer, "its data did not arrive in shared memory")

    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        lane = self._lane(axis, x.dtype) if axis.size > 1 else None
        if lane is None:
            return super().start_all_reduce(x, axis, op)
        return self._start(lane, SUM if op == "sum" else MAX, x, x, x)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        lane = self._lane(axis) if axis.size > 1 else None
        if lane is None:
            return super().start_all_gather(x, axis)
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
        return self._start(lane, GATHER, x, out, out)

    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        lane = self._lane(axis, x.dtype) if axis.size > 1 else None
        if lane is None:
            return super().start_reduce_scatter(x, axis, scale)
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
        return self._start(lane, SCATTER, x, out, out, scale)

    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        lane = self._lane(axis) if axis.size > 1 else None
        if lane is None:
            return super().start_all_to_all(x, axis, rows)
        if rows is None:
            even = (x.shape[0] // axis.size,) * axis.size
            rows = RowCounts(even, even)
        out = x.new_empty(sum(rows.received), *x.shape[1:])
        blocks, slots = x.split(rows.sent), out.split(rows.received)
        slots[axis.rank].copy_(blocks[axis.rank])
        parts: list[Pending[Any]] = []
        # Each rank begins with its next neighbour, so that not all ranks send to the first rank at once.
        for distance in range(1, axis.size):
            to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
            parts.append(self._start(self._link_to(axis, to), SEND, blocks[to], None, None))
            parts.append(self._start(self._link_to(axis, source), RECEIVE, None, slots[source], slots[source]))
        return _Several(parts, out)

    def _start_sum(self, flat: Tensor, axis: Axis, scale: float) -> Pending[Tensor]:
        lane = self._lane(axis, flat.dtype)
        return (
            super()._start_sum(flat, axis, scale) if lane is None else self._start(lane, SUM, flat, flat, flat, scale)
        )

    def lay_out(self, mesh: Mesh) -> None:
        super().lay_out(mesh)
        if self._exchange and mesh.pp_size > 1:
            for axis in axes_of(mesh):
                self._exchange.lane(axis)

    def _link_to(self, axis: Axis, position: int) -> Any:
        peer = axis.group_of(dist.get_rank())[position]
        return self._exchange.link(peer) if self._exchange else None

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        link = self._link_to(axis, to)
        return super().start_send(x, axis, to) if link is None else self._start(link, SEND, x, None, None)

    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        link = self._link_to(axis, source)
        if link is None:
            return super().start_receive(like, axis, source)
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._start(link, RECEIVE, None, out, out)

    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        if self._link_to(axis, peer) is None:
            return super().exchange(x, axis, peer)
        sending = self.start_send(x, axis, peer)
        received = self.start_receive(x, axis, peer).wait()
        sending.wait()
        return received

    def forget(self) -> None:
        self.unshare()
        super().forget()
