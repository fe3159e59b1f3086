"""Staging of a rank's shards in host memory, in the order of the rank's file, so that the disk needs no copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nxtrain.checkpoint.manifest import TensorEntry
from nxtrain.checkpoint.shards import Shards, TensorShard, owned, tensor_shards
from nxtrain.common.io.checksummed_file import aligned_memory
from nxtrain.common.sharding import Layout

Pin = Callable[[Tensor], "Callable[[], None] | None"]
"""`Backend.pin`."""


class SharedPlan:
    """Shards that all ranks write, gathered once: a run writes the same shards in each checkpoint.

    Attributes:
        is_planned: The leader already has this rank's shards.
        tensors: Tensors of all ranks, by key; on the leader, once gathered.
    """

    def __init__(self) -> None:
        self.is_planned = False
        self.tensors: dict[str, TensorEntry] = {}


def in_file_order(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Shards with wide types first, so that the offset of every entry is a multiple of its size."""
    return sorted(shards, key=lambda shard: -shard.dtype.itemsize)


@dataclass(frozen=True)
class Staged:
    """Host tensors of the shards that a rank writes, and the memory of all tensors; if empty, tensors are copied.

    Args:
        arrived: Waits until a device has written the tensors.
    """

    tensors: Mapping[TensorShard, Tensor]
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    joint: SharedPlan = field(default_factory=SharedPlan)
    arrived: Callable[[], None] = lambda: None


class Staging:
    """Host memory for the shards of a rank, reused from one checkpoint to the next.

    Args:
        layout: The entries that the rank holds.
        pin: `Backend.pin`. If memory is pinned, the host queues the copies, and the device makes them before the next
            update.
    """

    def __init__(self, layout: Layout, pin: Pin = lambda memory: None) -> None:
        self._layout, self._pin = layout, pin
        self._unpin: Callable[[], None] | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._staged: Staged | None = None

    def fill(self, shards: Shards) -> Staged:
        """Copy the shards to the host, each local tensor in one transfer; the result is valid until the next call."""
        staged = self._staged or self.allocate(shards)
        if self._unpin is None:
            self._unpin = self._pin(staged.memory)
        is_pinned = self._unpin is not None
        for (kind, parameter), buffer in self._buffers.items():
            buffer.copy_(shards[kind][parameter].detach(), non_blocking=is_pinned)
        if not is_pinned:
            return staged
        return replace(staged, arrived=torch.accelerator.current_stream().record_event().synchronize)

    def allocate(self, shards: Shards) -> Staged:
        """Take the host memory for shards, without a copy of their content."""
        mine = self._mine(shards)
        memory = torch.frombuffer(aligned_memory(max(1, self.num_bytes(shards))), dtype=torch.uint8)
        tensors: dict[TensorShard, Tensor] = {}
        start = 0
        for chunk in mine:
            name = (chunk.kind, chunk.parameter)
            if name not in self._buffers:
                x = shards[chunk.kind][chunk.parameter]
                self._buffers[name] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
                start += x.nbytes
            tensors[chunk] = chunk.of(self._buffers[name])
        self._staged = Staged(tensors, memory)
        return self._staged

    def release(self) -> None:
        """Free the host memory, which no device may be writing; the next copy allocates it again."""
        if self._unpin is not None:
            self._unpin()
        self._unpin = None
        self._staged = None
        self._buffers.clear()

    @property
    def is_allocated(self) -> bool:
        """True once the host memory is taken."""
        return self._staged is not None

    def num_bytes(self, shards: Shards) -> int:
        """Host memory that `fill` takes for shards."""
        names = {(chunk.kind, chunk.parameter) for chunk in self._mine(shards)}
        return sum(shards[kind][parameter].nbytes for kind, parameter in names)

    def refer(self, shards: Shards) -> Staged:
        """Shards without a copy. Tensors are fetched to the host at their write, and must not change until then."""

        def fetch(chunk: TensorShard) -> Tensor:
            return chunk.of(shards[chunk.kind][chunk.parameter].detach().cpu())

        return Staged(LazyTensors(self._mine(shards), fetch))

    def _mine(self, shards: Shards) -> list[TensorShard]:
        """Shards that this rank writes, in the order of its file."""
        return in_file_order(owned(tuple(tensor_shards(shards, self._layout))))


class LazyTensors(Mapping[TensorShard, Tensor]):
    """Host tensors of shards, read at access, so that one tensor at a time is in memory."""

    def __init__(self, chunks: Sequence[TensorShard], read: Callable[[TensorShard], Tensor]) -> None:
        self._chunks, self._read = dict.fromkeys(chunks), read

    def __getitem__(self, chunk: TensorShard) -> Tensor:
        return self._read(chunk)

    def __iter__(self) -> Iterator[TensorShard]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)
