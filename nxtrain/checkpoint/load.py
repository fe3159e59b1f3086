"""Loading: each rank reads the entries that its own layout holds, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from nxtrain.checkpoint.chunks import Shards, chunks
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.planner import ChunkLoadPlanner, collective
from nxtrain.checkpoint.save import is_distributed
from nxtrain.sharding import Layout


def load(path: Path, shards: Shards, cut: Layout, *, process_group: dist.ProcessGroup | None = None) -> Meta:
    """Fill local tensors from a checkpoint, padding with zeros; all or none of them. Every rank calls this.

    Args:
        path: Folder of the checkpoint.
        shards: Kind to parameter name to local tensor, on any device. Kinds that are not asked for are not read.
        cut: Where they lie in the model.
        process_group: Group of all ranks that can carry host objects; None for the default group.

    Raises:
        CheckpointError: It is damaged, or its tensors are not those of the model in name, shape and type.
    """
    meta = read_meta(path)
    buffers = {
        kind: {name: torch.zeros(local.shape, dtype=local.dtype) for name, local in tensors.items()}
        for kind, tensors in shards.items()
    }
    targets = {chunk: chunk.of(buffers[chunk.kind][chunk.parameter]) for chunk in chunks(shards, cut)}
    with collective(f"cannot load {path}"):
        dcp.load(
            {},
            storage_reader=dcp.FileSystemReader(path),
            planner=ChunkLoadPlanner(targets, complete=tuple(shards)),
            process_group=process_group,
            no_dist=not is_distributed(cut.mesh),
        )
    with torch.no_grad():
        for kind, tensors in shards.items():
            for name, local in tensors.items():
                local.copy_(buffers[kind][name])
    return meta
