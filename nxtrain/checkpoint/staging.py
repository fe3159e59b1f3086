"""Host memory for what a rank writes, laid out as its file will be, so that the disk takes it from where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from nxtrain.checkpoint.dcp_storage import Joint
from nxtrain.checkpoint.shards import Chunk, Shards, chunks, owned
from nxtrain.io.checksummed_file import aligned_memory
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Staged:
    """What a rank writes.

    Args:
        tensors: By chunk.
        memory: The bytes in which all of them lie.
        joint: What all ranks write, the same each time.
    """

    tensors: Mapping[Chunk, Tensor]
    memory: Tensor
    joint: Joint = field(default_factory=Joint)


class Staging:
    """The memory, kept from one checkpoint to the next.

    Args:
        cut: Where the rank's tensors lie in the model.
    """

    def __init__(self, cut: Layout) -> None:
        self._cut = cut
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._staged: Staged | None = None

    def fill(self, shards: Shards) -> Staged:
        """Bring the chunks to the host, each local tensor in one transfer.

        Args:
            shards: Kind to parameter name to local tensor, on any device; the same ones in each call.

        Returns:
            What this rank writes; valid until the next call.
        """
        if self._staged is None:
            self._staged = self._prepare(shards)
        for (kind, parameter), buffer in self._buffers.items():
            buffer.copy_(shards[kind][parameter].detach())
        return self._staged

    def _prepare(self, shards: Shards) -> Staged:
        mine = sorted(owned(tuple(chunks(shards, self._cut))), key=lambda chunk: -chunk.dtype.itemsize)
        places = [
            (place, tuple(group)) for place, group in groupby(mine, key=lambda chunk: (chunk.kind, chunk.parameter))
        ]
        local = {(kind, parameter): shards[kind][parameter] for (kind, parameter), _ in places}
        memory = torch.frombuffer(aligned_memory(max(1, sum(x.nbytes for x in local.values()))), dtype=torch.uint8)
        tensors, start = {}, 0
        for place, group in places:
            x = local[place]
            buffer = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            tensors.update({chunk: chunk.of(buffer) for chunk in group})
            self._buffers[place] = buffer
            start += x.nbytes
        return Staged(tensors, memory)
