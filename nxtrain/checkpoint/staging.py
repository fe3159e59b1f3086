"""Staging of a rank's shards in host memory in file order, so that they are written to disk without another copy."""

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
"""Function that pins host memory, such as `Backend.pin`."""


class SharedPlan:
    """Manifest entries of all ranks' shards, gathered once, since a run writes the same shards in each checkpoint.

    Attributes:
        is_planned: The leader has gathered this rank's shards.
        tensors: Manifest entries by tensor key, on the leader only.
    """

    def __init__(self) -> None:
        self.is_planned = False
        self.tensors: dict[str, TensorEntry] = {}


def in_file_order(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Sort shards by element size, largest first, so that the file offset of every entry is aligned to its size."""
    return sorted(shards, key=lambda shard: -shard.dtype.itemsize)


@dataclass(frozen=True)
class Staged:
    """Host tensors of the shards that a rank writes.

    Args:
        tensors: Host tensor of each shard.
        memory: Buffer that contains the tensors, in file order; empty if tensors are copied when they are written.
        joint: Manifest entries of all ranks.
        arrived: Function that waits until the device has copied the tensors to the host.
    """

    tensors: Mapping[TensorShard, Tensor]
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    joint: SharedPlan = field(default_factory=SharedPlan)
    arrived: Callable[[], None] = lambda: None


class Staging:
    """Host memory for the shards of a rank, reused for each checkpoint.

    Args:
        layout: Sharding of the rank's tensors.
        pin: `Backend.pin`. With pinned memory, the host enqueues the copies, and the device makes them before the
            next update.
    """

    def __init__(self, layout: Layout, pin: Pin = lambda memory: None) -> None:
        self._layout, self._pin = layout, pin
        self._unpin: Callable[[], None] | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._staged: Staged | None = None

    def fill(self, shards: Shards) -> Staged:
        """Copy the shards to host memory, one transfer per local tensor; the result is valid until the next call."""
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
        """Allocate the host memory for shards, without copying them."""
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
        """Free the host memory, when no device writes to it; the next `fill` allocates memory again."""
        if self._unpin is not None:
            self._unpin()
        self._unpin = None
        self._staged = None
        self._buffers.clear()

    @property
    def is_allocated(self) -> bool:
        """True if the host memory is allocated."""
        return self._staged is not None

    def num_bytes(self, shards: Shards) -> int:
        """Bytes of host memory that `fill` needs for shards."""
        names = {(chunk.kind, chunk.parameter) for chunk in self._mine(shards)}
        return sum(shards[kind][parameter].nbytes for kind, parameter in names)

    def refer(self, shards: Shards) -> Staged:
        """Stage shards without a copy; tensors are copied to the host at the write, and must not change before."""

        def fetch(chunk: TensorShard) -> Tensor:
            return chunk.of(shards[chunk.kind][chunk.parameter].detach().cpu())

        return Staged(LazyTensors(self._mine(shards), fetch))

    def _mine(self, shards: Shards) -> list[TensorShard]:
        """List the shards that this rank writes, in the order of its file."""
        return in_file_order(owned(tuple(tensor_shards(shards, self._layout))))


class LazyTensors(Mapping[TensorShard, Tensor]):
    """Mapping of shards to host tensors that reads a tensor on access, so that one tensor at a time is in memory."""

    def __init__(self, chunks: Sequence[TensorShard], read: Callable[[TensorShard], Tensor]) -> None:
        self._chunks, self._read = dict.fromkeys(chunks), read

    def __getitem__(self, chunk: TensorShard) -> Tensor:
        return self._read(chunk)

    def __iter__(self) -> Iterator[TensorShard]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)
