"""Races of a pretended GPU between its streams, and between GPU and host, found by the order of its operations.

Events, waits and synchronizations give the order, as in torch's sanitizer of CUDA. An access belongs to a whole
storage, also in memory of the host. A collective works on its own stream. New memory is compared with the last accesses
to the memory that was there before. A copy of memory that was used again too early is a race once something reads the
copy. Collectives keep their memory themselves.

    with opened_gpu() as backend:
        with races() as found:
            train_step(...)
    assert found == []
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, StreamSynchronizations, zip_arguments
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HOST = -1
"""The host, among the numbers of streams."""

COLLECTIVE = "c10d::"
OVERWRITTEN = (f"{COLLECTIVE}allreduce_", f"{COLLECTIVE}recv_")
"""Collectives whose schema does not tell that they change their arguments."""

LINES = 4
"""Most lines of code that describe an access."""

_modes: list[_Races] = []
"""The mode that hears of events and memory: torch takes callbacks for the whole life of a process."""


@dataclass(frozen=True)
class _Access:
    operation: str
    stream: int
    number: int
    is_write: bool
    frames: str

    def __str__(self) -> str:
        kind = "write" if self.is_write else "read"
        place = "the host" if self.stream == HOST else f"stream {self.stream:x}"
        return f"{kind} by {self.operation} on {place} ({self.frames})"


@dataclass
class _Memory:
    """Accesses to a storage since its last write."""

    size: int = 0
    write: _Access | None = None
    reads: list[_Access] = field(default_factory=list)

    @property
    def last(self) -> list[_Access]:
        return self.reads if self.write is None else [*self.reads, self.write]


class _Races(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.syncs = StreamSynchronizations()
        self._found = found
        self._memories: dict[int, _Memory] = {}
        self._held = set[int]()
        self._freed: list[tuple[int, int, list[_Access]]] = []
        self._torn: dict[int, str] = {}
        self._number, self._current = 0, 0
        self._works_on: set[int] | None = None
        """Streams of the collective that is being started; None outside of one."""

    def record(self, event: int, stream: int) -> None:
        if self._works_on is not None and stream != self._current:
            self.syncs.update_seq_num(stream, self._number)
            self._works_on.add(stream)
        self.syncs.record_state(event, stream)

    def allocate(self, pointer: int) -> None:
        self._memories[pointer] = _Memory()
        self._held.discard(pointer)

    def free(self, pointer: int) -> None:
        memory = self._memories.pop(pointer, _Memory())
        last = [access for access in memory.last if not access.operation.startswith(COLLECTIVE)]
        if last and pointer not in self._held:
            self._freed.append((pointer, pointer + memory.size, last))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, given = function._schema, zip_arguments(function._schema, args, kwargs or {})
        name = str(schema.name)
        self._number += 1
        self._current = torch.cuda.current_stream().cuda_stream
        makes = FACTORY_FUNCTION_REGEX.match(name) is not None
        reads: dict[int, Tensor] = {}
        writes: dict[int, Tensor] = {}
        for argument, value in given:
            if argument.alias_info is None and not makes:
                reads |= _storages(value)
            elif argument.alias_info is not None and argument.alias_info.is_write:
                writes |= _storages(value)
        if name == "aten::record_stream":
            self._held |= reads.keys()
        if name in OVERWRITTEN:
            writes |= reads
        collective = name.startswith(COLLECTIVE)
        if not collective:
            self._see(name, reads, writes)
        self._works_on = set() if collective else None
        result = function(*args, **(kwargs or {}))
        stream = min(self._works_on or (), default=None)
        self._works_on = None
        made: dict[int, Tensor] = {}
        for returned, value in zip(schema.returns, _tuple(result), strict=False):
            if returned.alias_info is None and not makes:
                made |= _storages(value)
        if collective:
            self._see(name, reads, {**writes, **made}, stream)
        else:
            self._see(name, {}, {key: x for key, x in made.items() if key not in writes})
        return result

    def _see(
        self, name: str, reads: Mapping[int, Tensor], writes: Mapping[int, Tensor], stream: int | None = None
    ) -> None:
        tensors = {**reads, **writes}
        if stream is None:
            stream = self._current if any(x.is_cuda for x in tensors.values()) else HOST
        if stream != HOST:
            self.syncs.update_seq_num(stream, self._number)
        for key, x in tensors.items():
            access = _Access(name, stream, self._number, key in writes, _frames())
            memory = self._memories.setdefault(key, _Memory())
            if not memory.size:
                memory.size = x.untyped_storage().nbytes()
                self._compare_with_freed(key, key + memory.size, access)
            if key in reads and memory.write is not None and memory.write.number in self._torn:
                self._found.append(f"{access}: of {self._torn[memory.write.number]}")
            earlier = memory.last if access.is_write else memory.last[len(memory.reads) :]
            self._found += [f"{access}: too early after {one}" for one in earlier if not self._is_after(stream, one)]
            if access.is_write:
                memory.write, memory.reads = access, []
            else:
                memory.reads = [one for one in memory.reads if one.stream != stream] + [access]

    def _compare_with_freed(self, begin: int, end: int, access: _Access) -> None:
        """Compare the first access to new memory with the last ones to what was there before."""
        others = []
        for first, last, accesses in self._freed:
            if last <= begin or end <= first:
                others.append((first, last, accesses))
                continue
            for one in accesses:
                if self._is_after(access.stream, one):
                    continue
                if one.is_write:
                    self._found.append(f"{access}: memory used again too early after {one}")
                self._torn[one.number] = f"memory used again too early after {one}"
        self._freed = others

    def _is_after(self, stream: int, access: _Access) -> bool:
        if access.stream == HOST:
            return True
        if stream == HOST:
            return access.number <= self.syncs.host_sync_state.get(access.stream, -1)
        return self.syncs.is_ordered_after(stream, access.number, access.stream)


def _tuple(result: Any) -> Iterable[Any]:
    return result if isinstance(result, tuple) else (result,)


def _storages(value: Any) -> dict[int, Tensor]:
    """Tensors in a value by the address of their memory."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.device.type != "meta"]
    return {x.untyped_storage().data_ptr(): x for x in tensors if x.untyped_storage().nbytes()}


def _frames() -> str:
    """The innermost lines of nxtrain and of torch's sharding, the last call first."""
    frame, lines = sys._getframe(), list[str]()
    while frame.f_back is not None and len(lines) < LINES:
        frame = frame.f_back
        path = frame.f_code.co_filename
        if "/nxtrain/" in path or "/fsdp/" in path:
            lines.append(f"{path.rpartition('/')[2]}:{frame.f_lineno}")
    return " < ".join(lines)


def _listen() -> None:
    """Register callbacks that serve the newest mode, once for the process."""
    torch._C._activate_gpu_trace()
    of_syncs = {
        "event_creation": "create_event",
        "event_deletion": "delete_event",
        "stream_creation": "create_stream",
        "device_synchronization": "sync_all_streams",
        "stream_synchronization": "all_streams_wait_for_stream",
        "event_synchronization": "all_streams_wait_for_event",
    }
    for name, method in of_syncs.items():

        def follow(*numbers: int, method: str = method) -> None:
            for mode in _modes:
                getattr(mode.syncs, method)(*numbers)

        getattr(gpu_trace, f"register_callback_for_{name}")(follow)

    def wait(event: int, stream: int) -> None:
        for mode in _modes:
            mode.syncs.stream_wait_for_event(stream, event)

    def record(event: int, stream: int) -> None:
        for mode in _modes:
            mode.record(event, stream)

    def allocate(pointer: int) -> None:
        for mode in _modes:
            mode.allocate(pointer)

    def free(pointer: int) -> None:
        for mode in _modes:
            mode.free(pointer)

    gpu_trace.register_callback_for_event_wait(wait)
    gpu_trace.register_callback_for_event_record(record)
    gpu_trace.register_callback_for_memory_allocation(allocate)
    gpu_trace.register_callback_for_memory_deallocation(free)


_listening: list[bool] = []


@contextmanager
def races() -> Iterator[list[str]]:
    """Find the races of the operations in this context; the list grows as they are found."""
    if not _listening:
        _listen()
        _listening.append(True)
    found: list[str] = []
    mode = _Races(found)
    _modes.append(mode)
    try:
        with mode:
            yield found
    finally:
        _modes.remove(mode)
