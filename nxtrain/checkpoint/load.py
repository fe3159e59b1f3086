"""Loading: each rank reads the entries that its own layout holds, whatever layout wrote them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from nxtrain.checkpoint.dcp_planner import ChunkLoadPlanner
from nxtrain.checkpoint.dcp_storage import FileReader
from nxtrain.checkpoint.directory import MANIFEST
from nxtrain.checkpoint.manifest import Manifest, read_manifest
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.shards import Chunk, Shards, chunks
from nxtrain.distributed.agreement import Group, by_leader, collective, is_distributed
from nxtrain.errors import DamagedError
from nxtrain.io.object_store import Place, content_of
from nxtrain.sharding import Layout


def open_checkpoint(path: Place) -> tuple[Meta, Manifest]:
    """What a checkpoint says about itself, and its manifest.

    Raises:
        DamagedError: One of them is not what was written.
        CheckpointError: It is incomplete, or of another format.
    """
    meta = read_meta(path)
    manifest = read_manifest(path)
    if zlib.crc32(content_of(path / MANIFEST)) != meta.manifest_crc32:
        raise DamagedError(path / MANIFEST, "its content is not what was written")
    return meta, manifest


def load(
    path: Place,
    shards: Shards,
    cut: Layout,
    *,
    process_group: Group = None,
    copies: Sequence[Place] = (),
    told: Callable[[DamagedError], None] = lambda damaged: None,
) -> Meta:
    """Fill local tensors from a checkpoint, padding with zeros. Every rank calls this.

    Tensors of the host are filled in place, others by way of the host. Everything that is read is verified.

    Args:
        path: Folder of the checkpoint.
        shards: Kind to parameter name to local tensor, on any device. Kinds that are not asked for are not read.
        cut: Where they lie in the model.
        process_group: Group of all ranks that can carry host objects; None for the default group.
        copies: Other places of the same checkpoint, for the blocks that this one lacks or has damaged.
        told: Is told what is damaged here and whole in another place.

    Raises:
        DamagedError: A file is not what was written; what was filled then has no meaning.
        CheckpointError: Its tensors are not those of the model in name, shape and type; none was touched.
    """
    action = f"cannot load {path}"
    meta, manifest = by_leader(lambda: open_checkpoint(path), cut.mesh, process_group, action)
    buffers = {kind: {name: _host(local) for name, local in tensors.items()} for kind, tensors in shards.items()}
    targets: dict[Chunk, Tensor] = {
        chunk: chunk.of(buffers[chunk.kind][chunk.parameter]) for chunk in chunks(shards, cut)
    }
    filled = Counter[tuple[str, str]]()
    for chunk, target in targets.items():
        filled[chunk.kind, chunk.parameter] += target.numel()
    padded = [
        buffer
        for kind, tensors in buffers.items()
        for name, buffer in tensors.items()
        if filled[kind, name] < buffer.numel()
    ]
    planner = ChunkLoadPlanner(targets, complete=tuple(shards), padded=padded)
    reader = FileReader(path, manifest, targets, copies)
    with collective(action):
        dcp.load(
            {},
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=not is_distributed(cut.mesh),
        )
    for damaged in reader.damage:
        told(damaged)
    with torch.no_grad():
        for kind, tensors in shards.items():
            for name, local in tensors.items():
                if not local.is_cpu:
                    local.copy_(buffers[kind][name])
    return meta


def _host(local: Tensor) -> Tensor:
    """Where a tensor is filled: in place, or in memory of its own."""
    return local.detach() if local.is_cpu else torch.empty(local.shape, dtype=local.dtype)
